import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.batch import NO_DOCUMENT, Batch
from trainer.config import TrainConfig
from trainer.dataset import Shards, ShardWriter, open_shards
from trainer.packing import add_noise, batches, blank_batch, pack, packing_waste

NUM_DOCUMENTS = 23


def config(**run: int) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "target": {"path": "target"},
            "data": {"path": "data"},
            "draft": {"num_anchors": 4, "block_size": 4},
            "batch": {"rows": 3, "row_tokens": 20},
            "pipeline": {"target_devices": ["cpu"], "drafter_devices": ["cpu"], "graphs": "none"},
            "run": run,
        }
    )


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    """Document d holds its own number, d + 1 times over a few; the last two thirds are the response."""
    rng = np.random.default_rng(0)
    with ShardWriter(tmp_path) as writer:
        for document in range(NUM_DOCUMENTS):
            length = int(rng.integers(4, 15))
            tokens = np.full(length, document + 1, dtype=np.uint32)
            writer.append("train", tokens, np.arange(length) >= length // 3)
        writer.finish(tokenizer_digest="", about={})
    return open_shards(tmp_path, "train")


def documents_of(batch: Batch) -> list[int]:
    """Numbers of the documents in a batch, each counted once for every span of a document id."""
    found = []
    for row_tokens, row_ids in zip(batch.tokens.tolist(), batch.doc_ids.tolist(), strict=True):
        for doc_id, span in itertools.groupby(zip(row_ids, row_tokens, strict=True), key=lambda pair: pair[0]):
            tokens = {token for _, token in span}
            if doc_id == NO_DOCUMENT:
                assert tokens == {0}
            else:
                assert len(tokens) == 1
                found.append(tokens.pop() - 1)
    return found


def epoch_of(shards: Shards, batches_: list[Batch]) -> tuple[list[int], int]:
    """Documents of the first epoch and how many batches it took."""
    seen: list[int] = []
    for count, batch in enumerate(batches_, start=1):
        seen += documents_of(batch)
        if len(seen) == len(shards):
            return seen, count
    raise AssertionError("no epoch ended")


def equal(a: Batch, b: Batch) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in ("tokens", "positions", "doc_ids", "loss_mask", "anchors", "anchor_valid")
    )


def chat_lengths(count: int) -> NDArray[np.int64]:
    """As chats have them: most are short, some fill a row."""
    lengths = np.random.default_rng(1).lognormal(6.0, 0.9, size=count)
    return np.clip(lengths, 20, 3072).astype(np.int64)


def test_rows_hold_whole_documents_and_no_document_is_lost() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, size=5000)
    rows = list(pack(lengths, 40, np.random.default_rng(3)))
    assert sorted(document for row in rows for document in row) == list(range(5000))
    assert all(sum(lengths[document] for document in row) <= 40 for row in rows)


@pytest.mark.parametrize("count", [3000, 20000])
def test_less_than_three_percent_of_the_slots_are_wasted(count: int) -> None:
    settings = TrainConfig.from_dict({"target": {"path": "t"}, "data": {"path": "d"}})
    lengths = chat_lengths(count)
    waste = packing_waste(lengths, settings)
    num_rows = sum(1 for _ in pack(lengths, 3072, np.random.default_rng([0, 0, 0])))
    assert waste == 1 - lengths.sum() / (-(-num_rows // 16) * settings.token_budget)
    assert 0 <= waste < 0.03


def test_long_and_short_documents_are_mixed_over_the_epoch() -> None:
    lengths = chat_lengths(20000)
    rows = list(pack(lengths, 3072, np.random.default_rng(0)))
    longest = [max(lengths[row]) for row in rows]
    parts = [np.mean(part) for part in np.array_split(longest, 8)]
    assert max(parts) / min(parts) < 1.25  # longest first inside a window, but not through the epoch
    assert rows != list(pack(lengths, 3072, np.random.default_rng(1)))
    assert rows == list(pack(lengths, 3072, np.random.default_rng(0)))


def test_every_batch_has_the_one_shape_and_an_epoch_has_every_document_once(shards: Shards) -> None:
    stream = list(itertools.islice(batches(shards, config()), 12))
    assert [batch.index for batch in stream] == list(range(12))
    assert {tuple(batch.tokens.shape) for batch in stream} == {(3, 20)}
    assert {tuple(batch.anchors.shape) for batch in stream} == {(3, 4)}
    first, count = epoch_of(shards, stream)
    assert sorted(first) == list(range(NUM_DOCUMENTS))
    second, _ = epoch_of(shards, stream[count:])
    assert sorted(second) == list(range(NUM_DOCUMENTS))
    assert first != second


def test_positions_restart_and_document_ids_ascend(shards: Shards) -> None:
    batch = next(batches(shards, config()))
    for row in range(3):
        ids = batch.doc_ids[row].tolist()
        spans = [(doc_id, len(list(span))) for doc_id, span in itertools.groupby(ids)]
        real = [doc_id for doc_id, _ in spans if doc_id != NO_DOCUMENT]
        assert real == list(range(len(real)))
        expected = [i if doc_id != NO_DOCUMENT else 0 for doc_id, length in spans for i in range(length)]
        assert batch.positions[row].tolist() == expected
        assert not batch.loss_mask[row][batch.doc_ids[row] == NO_DOCUMENT].any()


def test_the_last_batch_of_an_epoch_is_filled_with_invalid_rows(shards: Shards) -> None:
    settings = config()
    settings.batch.rows = 5
    stream = list(itertools.islice(batches(shards, settings), 12))
    _, count = epoch_of(shards, stream)
    assert packing_waste(shards.lengths, settings) == 1 - shards.lengths.sum() / (count * 5 * 20)
    invalid = (stream[count - 1].doc_ids == NO_DOCUMENT).all(dim=1)
    assert invalid.tolist().index(True) == 5 - sum(invalid.tolist()) > 0
    assert not stream[count - 1].anchor_valid[invalid].any()
    assert stream[count - 1].anchor_valid[~invalid].any()


def test_the_stream_is_reproducible_and_starts_anywhere(shards: Shards) -> None:
    stream = list(itertools.islice(batches(shards, config(seed=7)), 12))
    again = list(itertools.islice(batches(shards, config(seed=7), start=5), 7))
    assert all(equal(a, b) for a, b in zip(stream[5:], again, strict=True))
    assert [batch.index for batch in again] == list(range(5, 12))
    other = next(batches(shards, config(seed=8)))
    assert documents_of(stream[0]) != documents_of(other)


def test_anchors_differ_from_batch_to_batch_and_from_seed_to_seed(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        for _ in range(30):
            writer.append("train", np.full(20, 5, dtype=np.uint32), np.ones(20, dtype=np.bool_))
        writer.finish(tokenizer_digest="", about={})
    same = open_shards(tmp_path, "train")  # every batch alike, but for its anchors
    seen = [batch.anchors for seed in (0, 1) for batch in itertools.islice(batches(same, config(seed=seed)), 4)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(seen, 2))


def test_a_blank_batch_has_no_document_and_no_anchor() -> None:
    batch = blank_batch(config())
    assert tuple(batch.tokens.shape) == (3, 20)
    assert (batch.doc_ids == NO_DOCUMENT).all()
    assert not batch.anchor_valid.any()


def noise(seed: int, index: int, row: int) -> Tensor:
    """What is added to the features of a row, of deviation 0.5."""
    settings = config(seed=seed)
    settings.draft.feature_noise = 0.5
    features = torch.zeros(200, 500)
    add_noise(features, settings, index, row)
    return features


def test_noise_is_uniform_has_the_deviation_asked_for_and_is_added() -> None:
    found, most = noise(0, 0, 0), 0.5 * 3**0.5
    assert found.mean().item() == pytest.approx(0, abs=0.01)
    assert found.std().item() == pytest.approx(0.5, rel=0.01)
    assert (found.min().item(), found.max().item()) == pytest.approx((-most, most), rel=0.001)
    quarters = torch.histc(found, 4, -most, most) / found.numel()
    assert quarters.tolist() == pytest.approx([0.25] * 4, rel=0.03)
    settings, features = config(), torch.full((2, 3), 7.0)
    settings.draft.feature_noise = 1e-3
    add_noise(features, settings, 0, 0)
    assert (features - 7).abs().max() <= 2e-3


def test_noise_is_each_seeds_batchs_and_rows_own_and_every_time_the_same() -> None:
    places = list(itertools.product((0, 1), (0, 1), (0, 1)))
    assert all(torch.equal(noise(*place), noise(*place)) for place in places)
    assert not any(torch.equal(noise(*one), noise(*two)) for one, two in itertools.combinations(places, 2))
