import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.anchors import slot_weights
from trainer.config import TrainConfig
from trainer.loss import confidence_weights, drafter_loss


def _case(dtype=torch.float64, vocabulary=11):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, 4, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(vocabulary, 6, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(vocabulary, (2, 3, 4), generator=generator)
    weights = torch.rand(2, 3, 4, generator=generator)
    weights[0, 1] = 0
    return hidden, head, labels, weights


def _plain(hidden, head, labels, weights):
    logits = (hidden @ head.T)[:, :, 1:].flatten(0, 2)
    losses = torch.nn.functional.cross_entropy(logits, labels[:, :, 1:].flatten(), reduction="none")
    return (losses * weights[:, :, 1:].flatten()).sum()


def test_loss_by_hand():
    # Two words, head = identity, so a hidden state is its own logits. Slot 0 would add a lot, were it counted.
    hidden = torch.tensor([[[[9.0, -9.0], [0.0, math.log(3)], [math.log(4), 0.0]]]])
    labels = torch.tensor([[[1, 1, 1]]])
    weights = torch.tensor([[[5.0, 1.0, 0.5]]])
    parts = drafter_loss(hidden, torch.eye(2), labels, weights)
    assert parts.loss_sum.item() == pytest.approx(math.log(4 / 3) + 0.5 * math.log(5))
    assert parts.weight_sum.item() == 1.5
    assert parts.correct.tolist() == [[[False, True, False]]]


@pytest.mark.parametrize("chunk_tokens", [1, 5, 18, 4096])
def test_value_and_gradient_are_plain_autograds_whatever_the_chunk(chunk_tokens):
    hidden, head, labels, weights = _case()
    parts = drafter_loss(hidden, head, labels, weights, chunk_tokens)
    expected = _plain(hidden, head, labels, weights)
    torch.testing.assert_close(parts.loss_sum, expected)
    scaled, plain = (torch.autograd.grad(3 * loss, hidden)[0] for loss in (parts.loss_sum, expected))
    torch.testing.assert_close(scaled, plain)
    assert (scaled[:, :, 0] == 0).all()
    assert (scaled[0, 1] == 0).all()


@pytest.mark.parametrize("num_weighted", [0, 1, 7])
def test_on_cpu_the_head_is_spent_on_weighted_slots_alone(num_weighted):
    hidden, head, labels, weights = _case(vocabulary=100)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(1)).reshape(2, 3, 3)
    weights[:, :, 1:] *= order < num_weighted
    labels[:, :, 1:] = (hidden @ head.T).argmax(dim=-1)[:, :, 1:]  # all right, so that a place too many shows
    labels[0, 0, 1] = (labels[0, 0, 1] + 1) % 100
    with _LargestTensor() as seen:
        parts = drafter_loss(hidden, head, labels, weights)
    gradient = torch.autograd.grad(parts.loss_sum, hidden)[0]
    assert seen.numel <= max(num_weighted, 2) * 100
    expected = _plain(hidden, head, labels, weights)
    torch.testing.assert_close(parts.loss_sum, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden)[0])
    right = (weights > 0)[:, :, 1:] & ((hidden @ head.T).argmax(dim=-1) == labels)[:, :, 1:]
    assert torch.equal(parts.correct[:, :, 1:], right)
    assert not parts.correct[:, :, 0].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_low_precision_hidden_states_get_the_fp64_gradient(dtype, tolerance):
    hidden, head, labels, weights = _case(dtype)
    loss = drafter_loss(hidden, head, labels, weights).loss_sum
    exact = hidden.detach().double().requires_grad_()
    expected = _plain(exact, head.double(), labels, weights)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    gradient, reference = torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(expected, exact)[0]
    assert gradient.dtype == dtype
    assert (gradient.double() - reference).abs().max() < tolerance * reference.abs().max()


def test_the_frozen_head_gets_no_gradient_and_validation_makes_none():
    hidden, head, labels, weights = _case()
    head.requires_grad_()
    drafter_loss(hidden, head, labels, weights).loss_sum.backward()
    assert head.grad is None
    with torch.no_grad():
        assert not drafter_loss(hidden, head, labels, weights).loss_sum.requires_grad


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.numel = max(self.numel, out.numel())
        return out


def test_the_logits_of_all_slots_are_never_in_memory_at_once():
    hidden, head, labels, weights = _case(vocabulary=100)
    with _LargestTensor() as seen:
        drafter_loss(hidden, head, labels, weights, chunk_tokens=4).loss_sum.backward()
    assert seen.numel == 4 * 100


def test_confidence_weights_by_hand():
    # two blocks of three drafted slots, the drafter sure by 1/2, 1/4, 1 of the first; the second has its middle slot left out
    q = torch.tensor([[0.5, 0.25, 1.0], [0.5, 0.25, 1.0]])
    counts = torch.tensor([[True, True, True], [True, False, True]])
    a, b, c = 0.75, 0.625, 1.0  # (1 - 1/2) q + 1/2
    expected = [a + a * b + a * b * c, a * b + a * b * c, a * b * c, a + a * c, 0.0, a * c]
    weights = confidence_weights(-q.log().flatten(), counts.flatten(), 3)
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 4096])
def test_dpace_weighs_by_confidence_and_the_weights_are_constants(chunk_tokens):
    hidden, head, labels, weights = _case()
    weights = (weights > 0.3).float()
    parts = drafter_loss(hidden, head, labels, weights, chunk_tokens, by_confidence=True)
    counts = weights[:, :, 1:].flatten() > 0
    logits = (hidden @ head.T)[:, :, 1:].flatten(0, 2)
    losses = torch.nn.functional.cross_entropy(logits, labels[:, :, 1:].flatten(), reduction="none")
    by_confidence = confidence_weights(losses.detach(), counts, 3)
    torch.testing.assert_close(parts.loss_sum, (losses * by_confidence).sum(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts.weight_sum, by_confidence.sum().float(), rtol=1e-6, atol=1e-6)
    ours, plain = (torch.autograd.grad(loss, hidden)[0] for loss in (parts.loss_sum, (losses * by_confidence).sum()))
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def test_distillation_by_hand():
    # two words and the identity for a head: the target says 3/4 and 1/4, the drafter 1/2 and 1/2
    hidden = torch.zeros(1, 1, 2, 2, requires_grad=True)
    teacher = torch.tensor([[[[9.0, 9.0], [math.log(3), 0.0]]]])
    parts = drafter_loss(hidden, torch.eye(2), torch.tensor([[[0, 0]]]), torch.tensor([[[1.0, 2.0]]]), teacher=teacher)
    assert parts.loss_sum.item() == pytest.approx(2 * math.log(2))
    (gradient,) = torch.autograd.grad(parts.loss_sum, hidden)
    assert gradient[0, 0].tolist() == [[0, 0], [pytest.approx(2 * (0.5 - 0.75)), pytest.approx(2 * (0.5 - 0.25))]]
    assert parts.correct.tolist() == [[[False, True]]]


@pytest.mark.parametrize("chunk_tokens", [1, 5, 4096])
def test_distillation_is_plain_autograds_whatever_the_chunk(chunk_tokens):
    hidden, head, labels, weights = _case()
    teacher = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parts = drafter_loss(hidden, head, labels, weights, chunk_tokens, teacher=teacher)
    logits, wanted = ((states @ head.T)[:, :, 1:] for states in (hidden, teacher))
    losses = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    expected = (losses * weights[:, :, 1:]).sum()
    torch.testing.assert_close(parts.loss_sum, expected)
    ours, plain = (torch.autograd.grad(loss, hidden)[0] for loss in (parts.loss_sum, expected))
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize(("block_size", "gamma"), [(8, 4.0), (10, 5.0), (16, 7.0)])
def test_the_decay_of_each_block_size_by_hand(block_size, gamma):
    given = {"target": {"path": "t"}, "data": {"path": "d"}, "draft": {"block_size": block_size}}
    decayed = slot_weights(block_size, TrainConfig.from_dict(given).loss_gamma, torch.device("cpu"))
    assert decayed.tolist() == pytest.approx([0, *(math.exp(-k / gamma) for k in range(block_size - 1))])
    by_confidence = TrainConfig.from_dict(given | {"optim": {"loss_weights": "dpace"}}).loss_gamma
    assert slot_weights(block_size, by_confidence, torch.device("cpu")).tolist() == [0] + [1] * (block_size - 1)
