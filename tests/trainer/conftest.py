"""Small batches, drafters and targets for every trainer test."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from trainer import pipeline
from trainer.batch import NO_DOCUMENT, Batch
from trainer.config import TargetConfig, TrainConfig
from trainer.dataset import SPLITS, ShardWriter
from trainer.decoding import Decoder, Sampling
from trainer.events import EventLog
from trainer.model.draft import DraftModel, DraftSpec, TargetInfo
from trainer.model.target import load_causal_lm

VOCABULARY = 64


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return _make_batch


@pytest.fixture
def make_spec() -> Callable[..., DraftSpec]:
    return _make_spec


@pytest.fixture
def make_drafter() -> Callable[..., DraftModel]:
    return _make_drafter


@pytest.fixture
def target_info() -> TargetInfo:
    return TargetInfo(
        model_type="llama",
        num_layers=8,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.02,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.fixture
def make_target(tmp_path: Path) -> Callable[..., Path]:
    """Saves a tokenizer of bytes with this chat template."""

    def make(template: str | None = CHATML) -> Path:
        alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        inner = tokenizers.Tokenizer(models.BPE(alphabet, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<think>", "</think>"])
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "target")
        return tmp_path / "target"

    return make


def _make_batch(
    rows: Sequence[Sequence[int]], anchors: Sequence[Sequence[int]], *, num_slots: int, num_anchors: int, prompt: int = 2
) -> Batch:
    """Rows of documents of these lengths with random tokens, responses after `prompt` tokens, and the given anchors."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(rows), num_slots)
    tokens = torch.randint(3, VOCABULARY - 1, shape, generator=generator)
    positions = torch.zeros(shape, dtype=torch.int64)
    doc_ids = torch.full(shape, NO_DOCUMENT, dtype=torch.int32)
    for b, lengths in enumerate(rows):
        start = 0
        for document, length in enumerate(lengths):
            doc_ids[b, start : start + length] = document
            positions[b, start : start + length] = torch.arange(length)
            start += length
    in_document = doc_ids != NO_DOCUMENT
    padded = [[*given, *[0] * (num_anchors - len(given))] for given in anchors]
    valid = [[n < len(given) for n in range(num_anchors)] for given in anchors]
    return Batch(
        index=0,
        tokens=tokens * in_document,
        positions=positions,
        doc_ids=doc_ids,
        loss_mask=in_document & (positions >= prompt),
        anchors=torch.tensor(padded),
        anchor_valid=torch.tensor(valid),
    )


def _make_spec(**changes: object) -> DraftSpec:
    values: dict[str, object] = {
        "num_layers": 2,
        "block_size": 4,
        "target_layer_ids": (1, 3, 5),
        "mask_token_id": VOCABULARY - 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "layer_windows": (None, None),
        "dtype": torch.float32,
    }
    return DraftSpec(**(values | changes))  # type: ignore[arg-type]


def _make_drafter(spec: DraftSpec, seed: int = 0) -> DraftModel:
    """A drafter far from its initial state: no weight is small and no norm is one, so that nothing cancels."""
    model = DraftModel(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.3, generator=generator)
    return model


@dataclass(frozen=True)
class Trained:
    """A target in fp32, and a drafter that has learnt some of its greedy answers."""

    target: Path
    checkpoint: Path
    shards: Path
    """Its held-out documents are those that were trained on: a good share of the drafts is accepted."""
    model: Any
    prompts: list[list[int]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    run = tiny.make(root)
    model = load_causal_lm(TargetConfig(path="target", dtype="float32"), root, torch.device("cpu"))
    mask_token_id = 60
    greedy = Sampling(0.0, torch.Generator())
    prompts = np.random.default_rng(1).integers(2, 60, (40, 3)).tolist()
    decoder = Decoder(model, 23)
    answers = [decoder.decode(prompt, 20, {1}, greedy).tokens for prompt in prompts]
    kept = [(prompt, prompt + answer) for prompt, answer in zip(prompts, answers, strict=True) if mask_token_id not in answer]
    (root / "own").mkdir()
    with ShardWriter(root / "own") as writer:
        for split in SPLITS:
            for prompt, tokens in kept:
                writer.append(split, np.array(tokens, dtype=np.uint32), np.arange(len(tokens)) >= len(prompt))
        writer.finish(tokenizer_digest=run.tokenizer_digest, about={})
    config = run.config(
        data={"path": "own"}, batch={"rows": 4}, draft={"num_anchors": 24}, run={"steps": 150, "log_every": 150}
    )
    (root / "run.json").write_text(json.dumps(config))
    with contextlib.closing(EventLog(root / "events.jsonl")) as log:
        pipeline.train(TrainConfig.from_dict(config), root, log)
    return Trained(root / "target", root / "checkpoints" / "latest", root / "own", model, [prompt for prompt, _ in kept])
