"""Documents become batches of one static shape: whole documents side by side in rows, reproducible from (seed, epoch).

Pure functions over lengths, and one that slices the memory-mapped shards; only the BatchPrefetcher calls them. An epoch holds
every document once, in an order of its own; its last batch is filled with invalid rows.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.anchors import eligible_anchors, sample_anchors
from trainer.batch import NO_DOCUMENT, Batch
from trainer.config import TrainConfig
from trainer.dataset import Shards

_WINDOW_ROWS = 32
"""Rows that stay open for later documents; more waste less and mix the order less."""
_ORDER, _ANCHORS = 0, 1
"""Random streams of one seed."""


def pack(lengths: NDArray[np.int64], row_tokens: int, order: Sequence[int]) -> Iterator[list[int]]:
    """Rows of document indices: each document, in `order`, goes into the first open row that has room for it."""
    shortest = int(lengths.min())
    open_rows: list[tuple[list[int], int]] = []  # documents, tokens still free
    for document in order:
        length = int(lengths[document])
        slot = next((i for i, (_, free) in enumerate(open_rows) if free >= length), None)
        if slot is None:
            if len(open_rows) == _WINDOW_ROWS:
                yield open_rows.pop(0)[0]
            slot = len(open_rows)
            open_rows.append(([], row_tokens))
        row, free = open_rows[slot]
        row.append(document)
        open_rows[slot] = (row, free - length)
        if free - length < shortest:
            yield open_rows.pop(slot)[0]
    yield from (row for row, _ in open_rows)


def batches(shards: Shards, config: TrainConfig, start: int = 0) -> Iterator[Batch]:
    """Batch `start`, `start + 1` and so on without end, epoch after epoch; anchors depend on (seed, index) alone."""
    for index, rows in itertools.islice(enumerate(_batch_rows(shards.lengths, config)), start, None):
        yield _build(shards, config, index, rows)


def blank_batch(config: TrainConfig) -> Batch:
    """Invalid rows only: the static shape for a dry run. Its index is -1."""
    return _from_arrays(config, -1, _blank_arrays(config))


def _batch_rows(lengths: NDArray[np.int64], config: TrainConfig) -> Iterator[list[list[int]]]:
    for epoch in itertools.count():
        order = np.random.default_rng([config.run.seed, _ORDER, epoch]).permutation(len(lengths)).tolist()
        rows = pack(lengths, config.batch.row_tokens, order)
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
    state = np.random.SeedSequence([config.run.seed, _ANCHORS, index + 1]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]))
    anchors, valid = sample_anchors(eligible_anchors(loss_mask, doc_ids), config.draft.num_anchors, generator)
    return Batch(
        index=index,
        tokens=tokens,
        positions=positions,
        doc_ids=doc_ids,
        loss_mask=loss_mask,
        anchors=anchors,
        anchor_valid=valid,
    )
