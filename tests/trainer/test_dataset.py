import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.dataset import Shards, ShardWriter, check_fits, folder_that_appears_whole, open_shards
from trainer.errors import DataError

DOCUMENTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    with ShardWriter(folder) as writer:
        for tokens in DOCUMENTS:
            writer.append("train", np.array(tokens, dtype=np.uint32), np.array(tokens) % 2 == 0)
        writer.finish(tokenizer_digest="c0ffee", about={"target": "tiny"})
    return folder


def check(shards: Shards, **changes: Any) -> None:
    check_fits(shards, **({"row_tokens": 4, "vocab_size": 20, "tokenizer_digest": "c0ffee", "mask_token_id": 19} | changes))


def test_what_is_written_is_read_back(folder: Path) -> None:
    shards = open_shards(folder, "train")
    assert len(shards) == 3
    assert shards.lengths.tolist() == [3, 2, 4]
    for i, tokens in enumerate(DOCUMENTS):
        read, loss_mask = shards.document(i)
        assert read.tolist() == tokens
        assert loss_mask.tolist() == [token % 2 == 0 for token in tokens]
    check(shards)
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["target"] == "tiny"
    counts = meta["splits"]["train"]
    files = {name: (folder / "train" / f"{name}.bin").read_bytes() for name in ("tokens", "offsets", "loss_mask")}
    assert counts.pop("sha256") == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert counts == {"documents": 3, "tokens": 9, "response_tokens": 4}


def test_an_empty_split_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="held_out: the data set is empty"):
        open_shards(folder, "held_out")


@pytest.mark.parametrize("count", ["documents", "tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_split_without_documents_or_tokens_is_refused(folder: Path, count: str, value: int) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    counts = meta["splits"]["train"]
    counts[count] = value
    sizes = {"tokens": counts["tokens"], "offsets": counts["documents"] + 1, "loss_mask": counts["tokens"]}
    for name, size in sizes.items():  # as large as they are told to be, and their checksums are right
        data = bytes(max(size, 0) * {"tokens": 4, "offsets": 8, "loss_mask": 1}[name])
        (folder / "train" / f"{name}.bin").write_bytes(data)
        counts["sha256"][name] = hashlib.sha256(data).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match="train: the data set is empty"):
        open_shards(folder, "train")


def test_what_killed_processes_have_left_is_removed_and_what_is_being_written_stays(tmp_path: Path) -> None:
    output = tmp_path / "out"
    dead = subprocess.run(["sh", "-c", "echo $$"], stdout=subprocess.PIPE, check=True).stdout.decode().strip()
    for number in (dead, os.getpid()):
        (tmp_path / f".out.incoming-{number}" / "train").mkdir(parents=True)
    with folder_that_appears_whole(output) as folder:
        (folder / "meta.json").touch()
        assert list(tmp_path.iterdir()) == [folder]
        refusal = rf"{output} is being written by another `python -m trainer\.prepare`"
        with pytest.raises(DataError, match=refusal), folder_that_appears_whole(output):
            pass
        assert (folder / "meta.json").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "meta.json"]


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        (None, "meta.json is missing"),
        ("[" * 100_000, "is not JSON"),
        ("{", "is not JSON"),
        ('{"format": "other"}', "must describe dflash-token-shards version 2"),
        ('{"format": "dflash-token-shards", "version": 2}', r"meta.json does not say what is in train \('splits'\)"),
        ('{"format": "dflash-token-shards", "version": 2, "splits": 3}', "meta.json does not say what is in train"),
    ],
)
def test_a_foreign_folder_is_refused(tmp_path: Path, meta: str | None, text: str) -> None:
    if meta is not None:
        (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(DataError, match=text):
        open_shards(tmp_path, "train")


def test_a_meta_json_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "meta.json").mkdir()
    with pytest.raises(DataError, match=r"meta\.json cannot be read: Is a directory"):
        open_shards(tmp_path, "train")


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "loss_mask.bin"])
def test_a_file_that_was_cut_short_is_refused(folder: Path, name: str) -> None:
    path = folder / "train" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{name} must have \d+ bytes, got \d+"):
        open_shards(folder, "train")
    path.unlink()
    with pytest.raises(DataError, match=rf"{name} cannot be read"):
        open_shards(folder, "train")


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "loss_mask.bin"])
def test_a_file_that_was_changed_is_refused(folder: Path, name: str) -> None:
    path = folder / "train" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{name} is not what was written: its SHA-256 differs"):
        open_shards(folder, "train")


def test_offsets_that_do_not_ascend_are_refused(folder: Path) -> None:
    data = np.array([0, 3, 3, 9], dtype="<i8").tobytes()
    (folder / "train" / "offsets.bin").write_bytes(data)
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"]["train"]["sha256"]["offsets"] = hashlib.sha256(data).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match="must ascend from 0 to 9"):
        open_shards(folder, "train")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"row_tokens": 3}, r"document 2 has 4 tokens, batch\.row_tokens allows 3"),
        ({"vocab_size": 13}, "document 2 holds token id 13, the target's vocabulary has 13"),
        ({"mask_token_id": 8}, "document 1 holds token id 8, which is the mask token"),
        ({"tokenizer_digest": "decaf"}, "made with another vocabulary or chat template than the target's"),
    ],
)
def test_data_that_a_run_cannot_train_on_is_refused(folder: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        check(open_shards(folder, "train"), **changes)


@pytest.mark.parametrize(
    ("place", "value"), [("documents", "3"), ("documents", None), ("tokens", None), ("tokens", 9.0), ("sha256", {"tokens": 5})]
)
def test_a_count_of_the_wrong_type_is_one_sentence(folder: Path, place: str, value: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    counts = meta["splits"]["train"]
    counts[place] = counts[place] | value if isinstance(value, dict) else value
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(
        DataError, match=r"meta\.json does not say what is in train \((int|str) is needed, got .*; prepare the data"
    ):
        open_shards(folder, "train")
