"""A training run that takes seconds on a CPU, for tests of the trainer and for those that ship it somewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

from trainer.dataset import ShardWriter
from trainer.model.target import tokenizer_digest

VOCABULARY = 64
TEMPLATE = """\
{% for m in messages %}{% if m.role == 'assistant' %} w8 {{ m.content }} </s>\
{% else %} w7 {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} w8 {% endif %}"""


@dataclass(frozen=True)
class TinyRun:
    """A random target with a tokenizer, shards of documents that count up, and configurations that train on them in a blink."""

    root: Path
    tokenizer_digest: str

    def config(self, *, drafters: int = 1, targets: int = 1, **sections: dict[str, object]) -> dict[str, dict[str, object]]:
        base: dict[str, dict[str, object]] = {
            "target": {"path": "target", "dtype": "float32"},
            "draft": {"num_layers": 1, "block_size": 4, "num_anchors": 6, "target_layer_ids": [1, 2], "dtype": "float32"},
            "data": {"path": "data"},
            "batch": {"rows": 2, "row_tokens": 24},
            "optim": {"lr": 1e-2},
            "pipeline": {"target_devices": ["cpu"] * targets, "drafter_devices": ["cpu"] * drafters, "graphs": "none"},
            "run": {"steps": 6, "log_every": 1, "checkpoint_every": 1000, "root": str(self.root)},
        }
        return {name: values | sections.get(name, {}) for name, values in base.items()}

    def write_shards(self, name: str, documents: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]] = ()) -> None:
        """Shards whose documents are all response but for their first two tokens."""
        folder = self.root / name
        folder.mkdir()
        with ShardWriter(folder) as writer:
            for split, group in (("train", documents), ("held_out", held_out)):
                for tokens in group:
                    writer.append(split, np.array(tokens, dtype=np.uint32), np.arange(len(tokens)) >= 2)
            writer.finish(tokenizer_digest=self.tokenizer_digest, about={})


def make(root: Path, hidden_size: int = 32) -> TinyRun:
    """Write target, tokenizer and shards below `root`; kernels of a GPU want a `hidden_size` of at least 64."""
    words = {word: i for i, word in enumerate(["<unk>", "</s>", *(f"w{i}" for i in range(58))])}
    words_apart = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    words_apart.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words_apart,
        unk_token="<unk>",
        eos_token="</s>",
    )
    tokenizer.save_pretrained(root / "target")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(root / "target")
    run = TinyRun(root, tokenizer_digest(tokenizer))
    rng = np.random.default_rng(0)
    spans = [(rng.integers(58), rng.integers(5, 20)) for _ in range(40)]
    documents = [[2 + (first + i) % 58 for i in range(length)] for first, length in spans]
    run.write_shards("data", documents, held_out=documents[:7])
    return run


def make_with_template(root: Path) -> Path:
    """The folder of such a target whose tokenizer has a chat template, w7 before a question and w8 before an answer."""
    make(root)
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "target")
    return root / "target"
