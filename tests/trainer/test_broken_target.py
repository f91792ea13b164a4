"""Files of a target that are broken end in one sentence, whatever the code of others makes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from trainer import prepare
from trainer.config import DraftConfig, TargetConfig
from trainer.errors import TargetError
from trainer.model.target import load_target, load_tokenizer

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134217728\n"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    tiny.make(tmp_path)
    return tmp_path / "target"


def changed(**values: Any) -> Callable[[bytes], bytes]:
    return lambda before: json.dumps(json.loads(before) | values).encode()


def load(target: Path) -> None:
    draft = DraftConfig(target_layer_ids=[1, 2])
    load_target(TargetConfig(path=str(target), dtype="float32"), Path(), torch.device("cpu"), draft)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", lambda before: before[:-10]),
        ("model.safetensors", lambda _: b""),
        ("model.safetensors", lambda _: b"x" * 999),
        ("model.safetensors", lambda _: LFS),
        ("config.json", lambda _: b"[]"),
        ("config.json", changed(num_key_value_heads=0)),
        ("config.json", changed(num_attention_heads=0)),
        ("config.json", changed(dtype="nope")),
        ("config.json", changed(hidden_size="32")),
        ("config.json", changed(model_type=[])),
        ("config.json", changed(rope_parameters={"rope_type": "default", "rope_theta": None})),
        ("generation_config.json", lambda _: b"[]"),
    ],
)
def test_a_broken_file_of_the_model_is_one_sentence(target: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    (target / name).write_bytes(damage((target / name).read_bytes()))
    with pytest.raises(TargetError, match=rf"^target\.path {target} cannot be loaded: [^\n]+$") as caught:
        load(target)
    assert caught.value.__cause__ is not None, "who wants to know more needs the first cause"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "config.json"])
def test_a_broken_file_of_the_tokenizer_is_one_sentence_and_exit_code_3(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (target / name).write_text("[]")
    with pytest.raises(TargetError, match=r"cannot be loaded: [^\n]+$"):
        load_tokenizer(TargetConfig(path=str(target)), Path())
    given = ["--input", str(tmp_path / "x.jsonl"), "--output", str(tmp_path / "out"), "--target", str(target)]
    assert prepare.main(given) == 3
    err = capsys.readouterr().err
    assert err.startswith(f"error: target.path {target} cannot be loaded: ")
    assert err.count("\n") == 1
