import pytest
import torch

from trainer.loss import LossParts
from trainer.metrics import StepMetrics

CPU = torch.device("cpu")


def _add(metrics, correct, weights, valid, loss=1.5):
    weights = torch.tensor(weights)
    parts = LossParts(torch.tensor(loss), weights.sum(), torch.tensor(correct).bool())
    metrics.add(parts, weights)
    metrics.measure(parts, weights, torch.tensor(valid).bool())


def _one_row(metrics):
    # Slots 1..3 of three blocks: two right then wrong; right but only one labelled; invalid.
    correct = [[[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 1]]]
    weights = [[[0.0, 1.0, 0.5, 0.25], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]
    _add(metrics, correct, weights, [[1, 1, 0]])


def test_sums_by_hand():
    metrics = StepMetrics(4, CPU)
    _one_row(metrics)
    totals = metrics.read()
    assert totals.loss == pytest.approx(1.5 / 2.75)
    assert totals.draft_tokens == 4
    assert totals.accuracy == [1.0, 1.0, 0.0]
    assert totals.counted == (2, 1, 1)
    assert totals.acceptance_length == 1 + (2 + 1) / 2


def test_what_is_not_measured_counts_in_the_loss_alone():
    metrics = StepMetrics(4, CPU)
    weights = torch.tensor([[[0.0, 1.0, 1.0, 0.0]]])
    metrics.add(LossParts(torch.tensor(4.0), weights.sum(), torch.ones(1, 1, 4).bool()), weights)
    _one_row(metrics)
    totals = metrics.read()
    assert (totals.loss, totals.draft_tokens) == (pytest.approx(5.5 / 4.75), 6)
    assert (totals.accuracy, totals.num_blocks) == ([1.0, 1.0, 0.0], 2)


def test_a_gap_in_the_labels_ends_the_accepted_run():
    metrics = StepMetrics(4, CPU)
    _add(metrics, [[[0, 1, 1, 1]]], [[[0.0, 1.0, 0.0, 0.25]]], [[1]])
    assert metrics.read().acceptance_length == 2.0


def test_nothing_seen_is_unknown_not_zero_and_reading_starts_anew():
    metrics = StepMetrics(4, CPU)
    _one_row(metrics)
    metrics.read()
    totals = metrics.read()
    assert (totals.loss, totals.acceptance_length) == (None, None)
    assert totals.accuracy == [None, None, None]


def test_drafters_add_up_to_one_model():
    one, other, both = (StepMetrics(4, CPU) for _ in range(3))
    for metrics in (one, both):
        _one_row(metrics)
    for metrics in (other, both):
        _add(metrics, [[[0, 0, 1, 1]]], [[[0.0, 1.0, 0.5, 0.25]]], [[1]], loss=4.0)
    assert one.read() + other.read() == both.read()
