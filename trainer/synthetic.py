"""Targets with random weights and documents of random tokens, in known shapes, without a file: for measurements and GPU tests.

A module of its own because bench and tests share it. `loader` gives `pipeline.train` what it would have read from disk.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import transformers

from trainer.config import TrainConfig
from trainer.dataset import Shards
from trainer.model.draft import build_draft, resolve_draft, resolve_target_layer_ids
from trainer.model.target import TargetModel
from trainer.pipeline import Loaded, ends_by_device

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "heads": (4, 2, 32)},
    "small": {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "heads": (8, 4, 64)},
    "qwen3-4b": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "heads": (32, 8, 128),
    },
    "qwen3-8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "heads": (32, 8, 128),
    },
}
"""Qwen3 shapes; heads are (query heads, key and value heads, width of a head)."""


def loader(shape: str, document_tokens: tuple[int, int], num_documents: int = 512) -> Callable[[TrainConfig], Loaded]:
    """What loads a target of `shape` and documents of lengths in `document_tokens`, both ends included."""

    def load(config: TrainConfig) -> Loaded:
        devices = dict.fromkeys(config.pipeline.target_devices)
        targets = {device: random_target(shape, config, torch.device(device)) for device in devices}
        target = next(iter(targets.values()))
        vocab_size = target.info.vocab_size
        spec = resolve_draft(config.draft, target.info, vocab_size - 1)
        shards = random_shards(vocab_size - 1, document_tokens, num_documents)
        ends = ends_by_device(target, config, spec)
        initial = build_draft(spec, config.run.seed, torch.device("cpu"))
        held_out = random_shards(vocab_size - 1, document_tokens, num_documents) if config.run.validate_every else None
        return Loaded(shards=shards, held_out=held_out, targets=targets, initial=initial, ends=ends)

    return load


def random_target(shape: str, config: TrainConfig, device: torch.device) -> TargetModel:
    """A target of `shape` as Hugging Face initialises it, made on `device`; equal on devices of one kind."""
    values = dict(SHAPES[shape])
    heads, kv_heads, head_dim = values.pop("heads")
    qwen = transformers.Qwen3Config(
        **values,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )
    tapped = resolve_target_layer_ids(config.draft, qwen.num_hidden_layers)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(qwen, dtype=getattr(torch, config.target.dtype))
    return TargetModel(model.eval(), tapped, device, to_end=config.optim.loss_labels == "logits")


def random_shards(num_words: int, document_tokens: tuple[int, int], num_documents: int) -> Shards:
    """Documents of random tokens; the first eighth of each is its prompt."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(document_tokens[0], document_tokens[1] + 1, num_documents)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return Shards(
        name="random documents",
        tokenizer_digest="",
        tokens=rng.integers(num_words, size=offsets[-1], dtype=np.uint32),
        offsets=offsets,
        loss_mask=position >= np.repeat(lengths, lengths) // 8,
    )
