"""A drafter's config.json is checked once, by what it is: evaluation and export say the same of it."""

import json
import reprlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainer import evaluate, export
from trainer.checkpoint import checkpoint_config, read_config
from trainer.errors import CheckpointError

LAYERS = "target_layer_ids must be ascending layers in 0..6, got "
WINDOW = "sliding_window must be a whole number in 2..9223372036854775807, got "
KINDS = "layer_types must be full_attention or sliding_attention for each of the 2 layers, got "


def written(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        *(
            ({"target_layer_ids": ids}, f"{LAYERS}{ids}")
            for ids in ([2, 9], 5, [3, 1, 5], [1, 1], [1, 7], [-1], [], [1.5], None)
        ),
        *(
            ({"mask_token_id": token}, f"mask_token_id must be a token id in 0..63, got {token}")
            for token in (64, -1, None, True)
        ),
        *(
            ({"block_size": size}, f"block_size must be a whole number in 2..64, got {size}")
            for size in (0, 1, 1.5, None, 10**6)
        ),
        *(
            ({"rope_theta": theta}, f"rope_theta must be a number above 0, at most 1e+30, got {reprlib.repr(theta)}")
            for theta in (None, 0, float("nan"), float("inf"), 10**330)
        ),
        ({"intermediate_size": 10**15}, f"intermediate_size must be a whole number in 1..1048576, got {10**15}"),
        *(({"layer_types": kinds}, f"{KINDS}{kinds}") for kinds in (None, [], ["nope", "full_attention"], ["full_attention"])),
        ({"num_hidden_layers": "1"}, "num_hidden_layers must be a whole number in 1..64, got '1'"),
        ({"head_dim": None}, "head_dim must be a whole number in 2..1024, got None"),
        ({"head_dim": 15}, "head_dim must be even for rotary positions, got 15"),
        ({"num_attention_heads": 3}, "num_attention_heads must be a multiple of the 2 key and value heads, got 3"),
        *(
            ({"layer_types": ["sliding_attention"] * 2, "sliding_window": window}, f"{WINDOW}{reprlib.repr(window)}")
            for window in (None, 1, 10**30)
        ),
        ({"dtype": 5}, "dtype must be the name of a type, got 5"),
    ],
)
def test_a_value_that_is_none_of_a_drafters_is_one_sentence(
    make_spec: Any, target_info: Any, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    config = checkpoint_config(make_spec(), target_info)
    assert read_config(written(tmp_path, config)) == config
    inner = {key: changes.get(key, value) for key, value in config["dflash_config"].items()}
    with pytest.raises(CheckpointError) as caught:
        read_config(
            written(tmp_path, {key: changes.get(key, value) for key, value in config.items()} | {"dflash_config": inner})
        )
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {sentence}"


@pytest.mark.parametrize(
    "config", ["[" * 100_000, "[]", '{"dflash_config": []}', '{"dflash_config": null}'], ids=["deep", "list", "lists", "null"]
)
def test_a_file_that_is_no_drafters_is_one_sentence(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"config\.json (is not JSON|must be a DFlash drafter's)[^\n]*$"):
        read_config(tmp_path)


def copied(trained: Any, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(trained.checkpoint / name, folder / name)
    return folder


def test_evaluation_and_export_say_it(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(trained, tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [1, 3]  # the target has four layers
    written(folder, config)
    given = ["--checkpoint", str(folder), "--target", str(trained.target)]
    measured = ["--prompts", str(trained.shards), "--max-new-tokens", "12", "--dtype", "float32"]
    for command, more in ((export.main, ["--output", str(tmp_path / "out")]), (evaluate.main, measured)):
        assert command([*given, *more]) == 1
        err = capsys.readouterr().err
        assert err == f"error: {folder / 'config.json'}: target_layer_ids must be ascending layers in 0..2, got [1, 3]\n"


@pytest.mark.parametrize("tensors", [b"garbage" * 99, b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_tensors_that_cannot_be_read_are_not_exported(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], tensors: bytes
) -> None:
    folder = copied(trained, tmp_path / "drafter")
    (folder / "model.safetensors").write_bytes(tensors)
    given = ["--checkpoint", str(folder), "--target", str(trained.target), "--output", str(tmp_path / "out")]
    assert export.main(given) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {folder}: the checkpoint cannot be read: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
