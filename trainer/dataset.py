"""Token shards: the folder that `trainer.prepare` writes and the trainer maps into memory.

    meta.json                 format, version, digest of the tokenizer, counts and checksums of each split
    train/ and held_out/      tokens.bin     uint32 [T]      documents one after another
                              offsets.bin    int64 [D+1]     where each begins; the last is T
                              loss_mask.bin  uint8 [T]       1 on response tokens

Little-endian, without headers: meta.json holds the counts and each file's SHA-256, so a file that was cut short or changed is
noticed. One module writes and reads
the format. Only the BatchPrefetcher reads documents while a run is on.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer.errors import DataError
from trainer.events import alone_in

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
FORMAT = "dflash-token-shards"
VERSION = 2
_SCAN_TOKENS = 1 << 24
_FILES: Mapping[str, np.dtype[Any]] = {
    "tokens": np.dtype("<u4"),
    "offsets": np.dtype("<i8"),
    "loss_mask": np.dtype(np.bool_),
}
"""The files of a split, without their ending."""


@dataclass(frozen=True, slots=True)
class Shards:
    """One split, memory-mapped read-only."""

    name: str
    """Folder and split, for errors."""
    tokenizer_digest: str
    """Tells the tokenizer that made the shards from others."""
    tokens: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    checksum: str = ""
    """Tells the documents from others; empty if they come from no file."""

    def __len__(self) -> int:
        """Documents."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.offsets)

    def document(self, index: int) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Tokens and loss mask of one document, as views."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[span], self.loss_mask[span]


def open_shards(path: Path, split: Split) -> Shards:
    """Map one split; raises DataError for a folder that is missing, foreign, damaged or empty. Reads every byte once."""
    meta = _read_meta(path)
    try:
        counts, tokenizer_digest = meta["splits"][split], meta["tokenizer_digest"]
        num_documents, num_tokens = counts["documents"], counts["tokens"]
        checksums = {name: counts["sha256"][name] for name in _FILES}
        told = [(int, num_documents), (int, num_tokens), *((str, text) for text in (tokenizer_digest, *checksums.values()))]
        for kind, value in told:
            if type(value) is not kind:
                raise TypeError(f"{kind.__name__} is needed, got {value!r}")
    except (KeyError, TypeError) as error:
        raise DataError(f"{path / 'meta.json'} does not say what is in {split} ({error}); prepare the data again") from None
    folder = path / split
    if num_documents < 1 or num_tokens < 1:
        raise DataError(f"{folder}: the data set is empty; run `python -m trainer.prepare` on more conversations")
    sizes = {"tokens": num_tokens, "offsets": num_documents + 1, "loss_mask": num_tokens}
    arrays = {name: _map(folder / f"{name}.bin", kind, sizes[name], checksums[name]) for name, kind in _FILES.items()}
    offsets = arrays["offsets"]
    if offsets[0] != 0 or offsets[-1] != num_tokens or np.any(np.diff(offsets) <= 0):
        raise DataError(f"{folder / 'offsets.bin'}: offsets must ascend from 0 to {num_tokens}; the file is damaged")
    return Shards(
        name=str(folder),
        tokenizer_digest=tokenizer_digest,
        tokens=arrays["tokens"],
        offsets=offsets,
        loss_mask=arrays["loss_mask"],
        checksum=hashlib.sha256("".join(checksums.values()).encode()).hexdigest(),
    )


def check_fits(shards: Shards, *, row_tokens: int, vocab_size: int, tokenizer_digest: str, mask_token_id: int) -> None:
    """Refuse, with DataError, what a run could not train on. Reads every token once (about 1 GB/s)."""
    if shards.tokenizer_digest != tokenizer_digest:
        raise DataError(
            f"{shards.name} was made with another vocabulary or chat template than the target's; "
            "run `python -m trainer.prepare` with this target"
        )
    longest = int(np.argmax(shards.lengths))
    if shards.lengths[longest] > row_tokens:
        raise DataError(
            f"{shards.name}: document {longest} has {shards.lengths[longest]} tokens, batch.row_tokens allows "
            f"{row_tokens}; raise it, or prepare with --max-tokens {row_tokens}"
        )
    for start in range(0, len(shards.tokens), _SCAN_TOKENS):
        _check_ids(shards, start, vocab_size, mask_token_id)


def _check_ids(shards: Shards, start: int, vocab_size: int, mask_token_id: int) -> None:
    chunk = shards.tokens[start : start + _SCAN_TOKENS]
    outside, masks = chunk >= vocab_size, chunk == mask_token_id
    for found, text in (
        (outside, f"the target's vocabulary has {vocab_size}"),
        (masks, "which is the mask token; choose another draft.mask_token_id"),
    ):
        if found.any():
            at = int(np.argmax(found))
            document = int(np.searchsorted(shards.offsets, start + at, side="right")) - 1
            raise DataError(f"{shards.name}: document {document} holds token id {chunk[at]}, {text}")


class ShardWriter:
    """Writes both splits below `folder`, which exists and is empty; meta.json comes last, with `finish`."""

    def __init__(self, folder: Path) -> None:
        """Open all files; raises OSError."""
        self._folder = folder
        self._stack = ExitStack()
        self._splits = {split: _SplitFiles(folder / split, self._stack) for split in SPLITS}

    def __enter__(self) -> "ShardWriter":
        """The writer itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close all files."""
        self._stack.close()

    def append(self, split: Split, tokens: NDArray[np.uint32], loss_mask: NDArray[np.bool_]) -> None:
        """Add one document; both arrays are [T]."""
        self._splits[split].append(tokens, loss_mask)

    def finish(self, *, tokenizer_digest: str, about: Mapping[str, Any]) -> None:
        """Close the files and write meta.json; `about` is kept for readers of the file."""
        self._stack.close()
        counts = {split: files.counts() for split, files in self._splits.items()}
        meta = {"format": FORMAT, "version": VERSION, "tokenizer_digest": tokenizer_digest, "splits": counts, **about}
        (self._folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


class _SplitFiles:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        folder.mkdir()
        self._files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in _FILES}
        self._hashes = {name: hashlib.sha256() for name in _FILES}
        self._documents = self._num_tokens = self._response_tokens = 0
        self._write("offsets", np.array([0]))

    def append(self, tokens: NDArray[np.uint32], loss_mask: NDArray[np.bool_]) -> None:
        assert tokens.shape == loss_mask.shape
        self._documents += 1
        self._num_tokens += len(tokens)
        self._response_tokens += int(loss_mask.sum())
        self._write("tokens", tokens)
        self._write("loss_mask", loss_mask)
        self._write("offsets", np.array([self._num_tokens]))

    def counts(self) -> dict[str, Any]:
        return {
            "documents": self._documents,
            "tokens": self._num_tokens,
            "response_tokens": self._response_tokens,
            "sha256": {name: digest.hexdigest() for name, digest in self._hashes.items()},
        }

    def _write(self, name: str, values: NDArray[Any]) -> None:
        data = values.astype(_FILES[name]).tobytes()
        self._files[name].write(data)
        self._hashes[name].update(data)


@contextlib.contextmanager
def folder_that_appears_whole(output: Path) -> Iterator[Path]:
    """A new folder beside `output` that takes its name at the end, and is removed if anything fails; raises DataError.

    Those that killed processes have left are removed. A lock tells them from one that is being written, because a process's
    number may be another's in another container, or a later start's.
    """
    prefix = f".{output.name}.incoming-"
    held = DataError(f"{output} is being written by another `python -m trainer.prepare`; wait for it to end")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for left in [path for path in output.parent.iterdir() if path.name.startswith(prefix)]:
            with alone_in(left, held):
                shutil.rmtree(left, ignore_errors=True)
        folder = output.parent / f"{prefix}{os.getpid()}"
        folder.mkdir()
        with alone_in(folder, held):
            try:
                yield folder
                folder.rename(output)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{output} cannot be written: {error}") from None


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path}: no token shards here (meta.json is missing); `python -m trainer.prepare` writes them"
        ) from None
    except OSError as error:
        raise DataError(f"{path / 'meta.json'} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path / 'meta.json'} is not JSON: {error}") from None
    if not isinstance(meta, dict) or (meta.get("format"), meta.get("version")) != (FORMAT, VERSION):
        raise DataError(f"{path / 'meta.json'} must describe {FORMAT} version {VERSION}; prepare the data again")
    return meta


def _map(path: Path, dtype: np.dtype[Any], count: int, sha256: str) -> NDArray[Any]:
    try:
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            raise DataError(f"{path} must have {count * dtype.itemsize} bytes, got {size}; the file is damaged")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise DataError(f"{path} is not what was written: its SHA-256 differs from that in meta.json")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))  # a plain view: memmap's own slices are slow
