"""Steps of a drafter on CUDA equal the same steps on CPU, and a NaN changes nothing there either."""

import dataclasses
import math

import pytest
import torch
import transformers

from trainer.anchors import block_labels, eligible_anchors, sample_anchors
from trainer.batch import Batch, FeatureBatch
from trainer.config import DraftConfig, TrainConfig
from trainer.errors import NonFiniteError
from trainer.graphs import compiled
from trainer.loss import drafter_loss
from trainer.metrics import StepMetrics
from trainer.model.attention import draft_mask
from trainer.model.draft import build_draft, forward_blocks, resolve_draft
from trainer.model.target import TargetModel
from trainer.optim import DraftOptimizer

pytestmark = pytest.mark.gpu
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYERS = (1, 3)
CONFIG = TrainConfig.from_dict(
    {"target": {"path": "t"}, "data": {"path": "d"}, "optim": {"lr": 1e-2, "lr_warmup_steps": 0}, "run": {"steps": 10}}
)


@pytest.fixture
def targets():
    """One random model on both devices."""
    config = transformers.Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [transformers.Qwen3ForCausalLM(config) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    return [TargetModel(model.eval(), LAYERS, device) for model, device in zip(models, (CPU, CUDA), strict=True)]


def _batch():
    doc_ids = torch.zeros(2, 200, dtype=torch.int32)
    doc_ids[:, 90:], doc_ids[1, 150:] = 1, -1
    positions = torch.arange(200).repeat(2, 1)
    positions[:, 90:] -= 90
    loss_mask = (positions > 5) & (doc_ids >= 0)
    anchors, valid = sample_anchors(eligible_anchors(loss_mask, doc_ids), doc_ids, 150, torch.Generator().manual_seed(0))
    return Batch(
        index=0,
        tokens=torch.randint(90, (2, 200), generator=torch.Generator().manual_seed(1)),
        positions=positions,
        doc_ids=doc_ids,
        loss_mask=loss_mask,
        anchors=anchors,
        anchor_valid=valid,
    )


def _train(target, device, dtype, num_steps):
    """(losses, parameters, totals) of a few steps on one batch."""
    draft = DraftConfig(num_layers=2, block_size=8, target_layer_ids=list(LAYERS), dtype=dtype)
    model = build_draft(resolve_draft(draft, target.info, 95), 0, device)
    embedding, head = target.ends(device, model.spec.dtype)
    batch = _batch().to(device)
    features = FeatureBatch(batch=batch, context_features=target.context_features(batch))
    labels, weights = block_labels(batch, 8, 4.0)
    optimizer, metrics = DraftOptimizer(model, CONFIG), StepMetrics(8, device)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        hidden = forward_blocks(model, embedding, features, {None: draft_mask(batch, 8)})
        parts = drafter_loss(hidden, head, labels, weights, chunk_tokens=500)
        parts.loss_sum.backward()
        metrics.add(parts, weights)
        metrics.measure(parts, weights, batch.anchor_valid)
        optimizer.step(step, parts.loss_sum.detach(), parts.weight_sum)
        losses.append(parts.loss_sum.item() / parts.weight_sum.item())
    optimizer.check()
    return losses, model, metrics.read(), optimizer


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 3e-2)])
def test_training_on_cuda_is_training_on_cpu(targets, dtype, tolerance):
    (cpu, _, cpu_totals, _), (cuda, _, cuda_totals, _) = (
        _train(target, device, kind, 6) for target, device, kind in zip(targets, (CPU, CUDA), ("float32", dtype), strict=True)
    )
    assert cuda == pytest.approx(cpu, rel=tolerance)
    assert cuda[-1] < cuda[0]
    assert cuda_totals.counted == cpu_totals.counted
    assert cuda_totals.num_blocks == cpu_totals.num_blocks


def test_a_nan_changes_nothing_on_cuda(targets):
    _, model, _, optimizer = _train(targets[1], CUDA, "float32", 2)
    before = [p.clone() for p in model.parameters()]
    model.norm.weight.grad[0] = math.nan
    one = torch.ones((), device=CUDA)
    optimizer.step(2, one, one)
    model.norm.weight.grad[0] = 1.0
    optimizer.step(3, one, one)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    with pytest.raises(NonFiniteError, match="step 3"):
        optimizer.check()


def test_a_bf16_step_is_the_fp64_step_within_a_hundredth(targets):
    batch, grads, losses = _batch(), [], []
    for target, device, dtype in zip(targets, (CPU, CUDA), (torch.float64, torch.bfloat16), strict=True):
        draft = DraftConfig(num_layers=2, block_size=8, target_layer_ids=list(LAYERS))
        spec = dataclasses.replace(resolve_draft(draft, target.info, 95), dtype=dtype)
        model = build_draft(spec, 0, device)
        here = batch.to(device)
        features = FeatureBatch(batch=here, context_features=targets[0].context_features(batch).to(device))
        labels, weights = block_labels(here, 8, 4.0)
        optimizer = DraftOptimizer(model, CONFIG)
        embedding, head = target.ends(device, dtype)
        hidden = forward_blocks(compiled(model, "threadwarm", device), embedding, features, {None: draft_mask(here, 8)})
        parts = drafter_loss(hidden, head, labels, weights)
        parts.loss_sum.backward()
        losses.append((parts.loss_sum / parts.weight_sum).item())
        grads.append(optimizer.flat_grad.cpu().double())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert (grads[1] - grads[0]).norm() / grads[0].norm() < 1e-2
