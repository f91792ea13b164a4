import math

import pytest
import torch

from trainer.config import TrainConfig
from trainer.errors import NonFiniteError
from trainer.model.draft import build_draft
from trainer.optim import DraftOptimizer, learning_rate

ONE = torch.tensor(1.0)


def _config(steps=100, **optim):
    return TrainConfig.from_dict(
        {
            "target": {"path": "t"},
            "data": {"path": "d"},
            "optim": {"lr": 0.01} | optim,
            "run": {"steps": steps},
            "pipeline": {"target_devices": ["cpu"], "drafter_devices": ["cpu"], "graphs": "none"},
        }
    )


def _fill(model, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.grad.copy_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def model(make_spec):
    return build_draft(make_spec(), 0, torch.device("cpu"))


def test_the_rate_rises_linearly_then_falls_as_a_cosine_to_zero():
    config = _config(lr_warmup_steps=4)
    rates = [learning_rate(config, step) for step in range(101)]
    assert rates[:5] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert rates[52] == pytest.approx(0.005)
    assert rates[100] == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(_config(), 3) == 0.01, "the default warm-up is 4 % of the steps"
    assert learning_rate(_config(lr_warmup_steps=0), 0) == 0.01


def test_a_step_is_adamw_on_the_normalised_clipped_gradient(model, make_spec):
    config = _config(weight_decay=0.1, max_grad_norm=2.0, lr_warmup_steps=0)
    twin = build_draft(make_spec(), 0, torch.device("cpu"))
    groups = [
        {"params": [p for p in twin.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, fused=False)
    optimizer = DraftOptimizer(model, config)
    for step, scale in enumerate([1.0, 0.001, 5.0]):
        optimizer.zero_grad()
        _fill(model, scale)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad / 8
        expected_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 2.0)
        for group in reference.param_groups:
            group["lr"] = learning_rate(config, step)
        reference.step()
        grad_norm = optimizer.step(step, ONE, torch.tensor(8.0))
        assert grad_norm.item() == pytest.approx(expected_norm.item(), rel=1e-5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    optimizer.check()


def test_backward_fills_the_flat_gradient(model):
    optimizer = DraftOptimizer(model, _config())
    model.fc.weight.sum().backward()
    assert optimizer.flat_grad.sum().item() == model.fc.weight.numel()
    optimizer.zero_grad()
    model.fc.weight.sum().backward()
    assert optimizer.flat_grad.sum().item() == model.fc.weight.numel()


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_not_applied_nor_are_later_ones(model, where, value):
    optimizer = DraftOptimizer(model, _config())
    _fill(model)
    optimizer.step(0, ONE, ONE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _fill(model)
    if where == "gradient":
        model.norm.weight.grad[3] = value
    optimizer.step(1, torch.tensor(value) if where == "loss" else ONE, ONE)
    _fill(model)
    optimizer.step(2, ONE, ONE)
    optimizer.step(3, torch.tensor(math.nan), ONE)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    with pytest.raises(NonFiniteError, match=r"^step 2 \(batch 1\): loss and gradient must be finite, got NaN"):
        optimizer.check()
    with pytest.raises(NonFiniteError, match=r"^step 2 \(batches 3\.\.5\)"):
        optimizer.check(num_drafters=3)


def test_a_step_without_any_weight_has_a_zero_gradient(model):
    optimizer = DraftOptimizer(model, _config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert optimizer.step(0, torch.tensor(0.0), torch.tensor(0.0)).item() == 0
    optimizer.check()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_muon_is_torchs_own_on_matrices_and_adamw_on_norms(model, make_spec):
    config = _config(optimizer="muon", weight_decay=0.1, max_grad_norm=1e9, lr_warmup_steps=2)
    twin = build_draft(make_spec(), 0, torch.device("cpu"))
    muon = torch.optim.Muon(
        [p for p in twin.parameters() if p.ndim == 2], lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW([p for p in twin.parameters() if p.ndim == 1], lr=1.0, weight_decay=0.0)
    optimizer = DraftOptimizer(model, config)
    optimizer.hold(True)  # as warming up does
    _fill(model)
    optimizer.step(0, ONE, ONE)
    optimizer.hold(False)
    for step in range(4):
        optimizer.zero_grad()
        _fill(model, 1.0 + step)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad / 4
        for reference in (muon, adamw):
            for group in reference.param_groups:
                group["lr"] = learning_rate(config, step)
            reference.step()
        optimizer.step(step, ONE, torch.tensor(4.0))
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("optimizer_name", ["adamw", "muon"])
def test_a_skipped_step_leaves_parameters_and_statistics_as_they_were(model, optimizer_name):
    optimizer = DraftOptimizer(model, _config(optimizer=optimizer_name, weight_decay=0.1))
    _fill(model)
    optimizer.step(0, ONE, ONE)
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    assert any(name.startswith("momentum_buffer/") for name in before) == (optimizer_name == "muon")
    for held, loss in ((True, 1.0), (False, math.nan)):
        optimizer.hold(held)
        _fill(model, 3.0)
        optimizer.step(1, torch.tensor(loss), ONE)
        after = optimizer.state_tensors()
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name
    with pytest.raises(NonFiniteError, match="step 2 "):
        optimizer.check()


def test_muon_goes_on_from_its_state_bit_for_bit(make_spec):
    straight, broken, fresh = (build_draft(make_spec(), 0, torch.device("cpu")) for _ in range(3))
    config = _config(optimizer="muon", weight_decay=0.1)
    one, two = DraftOptimizer(straight, config), DraftOptimizer(broken, config)
    for step in range(4):
        for model, optimizer in ((straight, one), (broken, two)):
            if step == 2 and model is broken:
                state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
                broken, two = fresh, DraftOptimizer(fresh, config)
                two.hold(True)  # as warming up does
                two.step(0, ONE, ONE)
                two.hold(False)
                two.load_state_tensors(state)
                model, optimizer = broken, two
            _fill(model, 1.0 + step)
            optimizer.step(step, ONE, ONE)
    for p, q in zip(straight.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q)
