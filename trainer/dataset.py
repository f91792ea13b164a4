"""Token shards: the folder that `trainer.prepare` writes and the trainer maps into memory.

    meta.json                 format, version, digest of the tokenizer, counts of each split
    train/ and held_out/      tokens.bin     uint32 [T]      documents one after another
                              offsets.bin    int64 [D+1]     where each begins; the last is T
                              loss_mask.bin  uint8 [T]       1 on response tokens

Little-endian, without headers: meta.json holds the counts, so a file that was cut short is noticed. One module writes and reads
the format. Only the BatchPrefetcher reads documents while a run is on.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer.errors import DataError

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
FORMAT = "dflash-token-shards"
VERSION = 1
_SCAN_TOKENS = 1 << 24


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
    """Map one split; raises DataError for a folder that is missing, foreign, damaged or empty."""
    meta = _read_meta(path)
    try:
        counts, tokenizer_digest = meta["splits"][split], meta["tokenizer_digest"]
        num_documents, num_tokens = counts["documents"], counts["tokens"]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path / 'meta.json'} does not say what is in {split} ({error}); prepare the data again") from None
    folder = path / split
    if not num_documents:
        raise DataError(f"{folder}: the data set is empty; run `python -m trainer.prepare` on more conversations")
    offsets = _map(folder / "offsets.bin", np.dtype("<i8"), num_documents + 1)
    if offsets[0] != 0 or offsets[-1] != num_tokens or np.any(np.diff(offsets) <= 0):
        raise DataError(f"{folder / 'offsets.bin'}: offsets must ascend from 0 to {num_tokens}; the file is damaged")
    return Shards(
        name=str(folder),
        tokenizer_digest=tokenizer_digest,
        tokens=_map(folder / "tokens.bin", np.dtype("<u4"), num_tokens),
        offsets=offsets,
        loss_mask=_map(folder / "loss_mask.bin", np.dtype(np.bool_), num_tokens),
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
        self._tokens, self._offsets, self._loss_mask = (
            stack.enter_context((folder / f"{name}.bin").open("wb")) for name in ("tokens", "offsets", "loss_mask")
        )
        self._documents = self._num_tokens = self._response_tokens = 0
        self._write_offset()

    def append(self, tokens: NDArray[np.uint32], loss_mask: NDArray[np.bool_]) -> None:
        assert tokens.shape == loss_mask.shape
        self._tokens.write(tokens.astype("<u4").tobytes())
        self._loss_mask.write(loss_mask.astype(np.uint8).tobytes())
        self._documents += 1
        self._num_tokens += len(tokens)
        self._response_tokens += int(loss_mask.sum())
        self._write_offset()

    def counts(self) -> dict[str, int]:
        return {
            "documents": self._documents,
            "tokens": self._num_tokens,
            "response_tokens": self._response_tokens,
        }

    def _write_offset(self) -> None:
        self._offsets.write(np.array(self._num_tokens, dtype="<i8").tobytes())


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path}: no token shards here (meta.json is missing); `python -m trainer.prepare` writes them"
        ) from None
    except OSError as error:
        raise DataError(f"{path / 'meta.json'} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path / 'meta.json'} is not JSON: {error}") from None
    if not isinstance(meta, dict) or (meta.get("format"), meta.get("version")) != (FORMAT, VERSION):
        raise DataError(f"{path / 'meta.json'} must describe {FORMAT} version {VERSION}; prepare the data again")
    return meta


def _map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if size != count * dtype.itemsize:
        raise DataError(f"{path} must have {count * dtype.itemsize} bytes, got {size}; the file is damaged")
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))  # a plain view: memmap's own slices are slow
