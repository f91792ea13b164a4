"""Documents become batches of one static shape: whole documents side by side in rows, reproducible from (seed, epoch).

Pure functions over lengths, and one that slices the memory-mapped shards; only the BatchPrefetcher calls them. An epoch holds
every document once, in an order of its own; its last batch is filled with invalid rows.
"""

import bisect
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.anchors import eligible_anchors, sample_anchors
from trainer.batch import NO_DOCUMENT, Batch
from trainer.config import TrainConfig
from trainer.dataset import Shards

ORDER = 1
"""Counts the changes to what is in a batch, which a resumed run has to share: order, anchors and noise of one seed."""
_WINDOW_ROWS = 256
"""Rows that are packed together; more waste less and mix the order less."""
_ORDER, _ANCHORS, _NOISE = 0, 1, 2
"""Random streams of one seed."""


def pack(lengths: NDArray[np.int64], row_tokens: int, random: np.random.Generator) -> Iterator[list[int]]:
    """Rows of document indices, each document in one row, in an order that `random` draws.

    A window of documents is packed at a time, the longest first, each into the row that it fills best; its rows come in random
    order, and what lies in the emptiest one waits for the next window.
    """
    waiting: list[int] = []
    tokens = 0
    for document in random.permutation(len(lengths)).tolist():
        waiting.append(document)
        tokens += int(lengths[document])
        if tokens >= _WINDOW_ROWS * row_tokens:
            rows = _best_fit(lengths, row_tokens, waiting)
            waiting = min(rows, key=lambda row: int(lengths[row].sum()))
            rows.remove(waiting)
            tokens = int(lengths[waiting].sum())
            yield from _shuffled(rows, random)
    yield from _shuffled(_best_fit(lengths, row_tokens, waiting), random)


def packing_waste(lengths: NDArray[np.int64], config: TrainConfig) -> float:
    """The share of token slots that the first epoch leaves empty, rows that fill its last batch included."""
    num_batches = sum(1 for _ in _epoch(lengths, config, 0))
    return 1 - int(lengths.sum()) / (num_batches * config.token_budget)


def _best_fit(lengths: NDArray[np.int64], row_tokens: int, documents: list[int]) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free tokens and row, ascending
    for document in sorted(documents, key=lambda d: -lengths[d]):
        length = int(lengths[document])
        at = bisect.bisect_left(room, (length, 0))
        if at < len(room):
            free, row = room.pop(at)
        else:
            free, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(document)
        bisect.insort(room, (free - length, row))
    return rows


def _shuffled(rows: list[list[int]], random: np.random.Generator) -> Iterator[list[int]]:
    return (rows[i] for i in random.permutation(len(rows)))


def batches(shards: Shards, config: TrainConfig, start: int = 0) -> Iterator[Batch]:
    """Batch `start`, `start + 1` and so on without end, epoch after epoch; anchors depend on (seed, index) alone."""
    for index, rows in itertools.islice(enumerate(_batch_rows(shards.lengths, config)), start, None):
        yield _build(shards, config, index, rows)


def blank_batch(config: TrainConfig) -> Batch:
    """Invalid rows only: the static shape for a dry run. Its index is -1."""
    return _from_arrays(config, -1, _blank_arrays(config))


def _batch_rows(lengths: NDArray[np.int64], config: TrainConfig) -> Iterator[list[list[int]]]:
    for epoch in itertools.count():
        yield from _epoch(lengths, config, epoch)


def add_noise(features_SL: Tensor, config: TrainConfig, index: int, row: int) -> None:
    """Add `draft.feature_noise` to the context features of one row of batch `index`; what is added depends on nothing else."""
    generator = torch.Generator(features_SL.device).manual_seed(_seed(config, _NOISE, index, row))
    half = config.draft.feature_noise * 3**0.5  # a uniform distribution of this half width has the deviation asked for
    features_SL += torch.empty_like(features_SL).uniform_(-half, half, generator=generator)


def _seed(config: TrainConfig, *stream: int) -> int:
    return int(np.random.SeedSequence([config.run.seed, *stream]).generate_state(1, np.uint64)[0])


def _epoch(lengths: NDArray[np.int64], config: TrainConfig, epoch: int) -> Iterator[list[list[int]]]:
    rows = pack(lengths, config.batch.row_tokens, np.random.default_rng([config.run.seed, _ORDER, epoch]))
    while group := list(itertools.islice(rows, config.batch.rows)):
        yield group


def _build(shards: Shards, config: TrainConfig, index: int, rows: list[list[int]]) -> Batch:
    tokens, positions, doc_ids, loss_mask = arrays = _blank_arrays(config)
    for r, documents in enumerate(rows):
        end = 0
        for doc_id, document in enumerate(documents):
            doc_tokens, doc_mask = shards.document(document)
            span = slice(end, end + len(doc_tokens))
            tokens[r, span] = doc_tokens
            positions[r, span] = np.arange(len(doc_tokens))
            doc_ids[r, span] = doc_id
            loss_mask[r, span] = doc_mask
            end = span.stop
    return _from_arrays(config, index, arrays)


def _blank_arrays(config: TrainConfig) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_]]:
    shape = (config.batch.rows, config.batch.row_tokens)
    return (
        np.zeros(shape, dtype=np.int64),
        np.zeros(shape, dtype=np.int64),
        np.full(shape, NO_DOCUMENT, dtype=np.int32),
        np.zeros(shape, dtype=np.bool_),
    )


def _from_arrays(config: TrainConfig, index: int, arrays: tuple[NDArray[np.generic], ...]) -> Batch:
    tokens, positions, doc_ids, loss_mask = (torch.from_numpy(array) for array in arrays)
    generator = torch.Generator().manual_seed(_seed(config, _ANCHORS, index + 1))
    anchors, valid = sample_anchors(eligible_anchors(loss_mask, doc_ids), doc_ids, config.draft.num_anchors, generator)
    return Batch(
        index=index,
        tokens=tokens,
        positions=positions,
        doc_ids=doc_ids,
        loss_mask=loss_mask,
        anchors=anchors,
        anchor_valid=valid,
    )
