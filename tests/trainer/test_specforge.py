"""SpecForge's own training wrapper, out of its wheel, judges ours: the same loss, the same gradient of every parameter."""

import dataclasses
import importlib
import math
import types
from pathlib import Path

import pytest
import torch

from trainer.batch import FeatureBatch
from trainer.checkpoint import Staging, save_checkpoint
from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.loss import blocks_loss
from trainer.pipeline import load_all
from trainer.reference import plain_losses

LENGTH = 40


def config(**optim: object) -> TrainConfig:
    return TrainConfig.from_dict(
        {"target": {"path": "t"}, "data": {"path": "d"}, "draft": {"block_size": 4, "num_layers": 2}, "optim": optim}
    )


@pytest.mark.filterwarnings("ignore")  # of the packages that the judge imports
@pytest.mark.parametrize("windows", [(None, None), (5, None)], ids=["full", "sliding"])
@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_loss_and_gradients_are_specforges(make_batch, make_spec, make_drafter, target_info, tmp_path, windows, weights):
    ours = make_drafter(make_spec(layer_windows=windows))
    settings = config(loss_weights=weights)
    batch, context, ends = inputs(make_batch)
    parts, _ = blocks_loss(settings, ours, ends, FeatureBatch(batch=batch, context_features=context))
    theirs, loss_num, loss_den = judged(ours, settings, target_info, tmp_path, batch, context, ends)
    torch.testing.assert_close(parts.loss_sum, loss_num, rtol=1e-5, atol=1e-5)
    if weights == "decay":
        torch.testing.assert_close(parts.weight_sum, loss_den, rtol=1e-6, atol=1e-6)
    parts.loss_sum.backward()
    loss_num.backward()
    for name, parameter in ours.named_parameters():
        scale = float(theirs[name].grad.abs().max())
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.filterwarnings("ignore")  # of the packages that the judge imports
def test_in_bf16_our_gradient_is_as_near_to_fp32s_as_specforges_is(make_batch, make_spec, make_drafter, target_info, tmp_path):
    settings = config()
    batch, context, ends = inputs(make_batch)
    logs = []
    for seed in range(4):
        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            ours = make_drafter(make_spec(dtype=dtype), seed)
            held = tuple(end.to(dtype) for end in ends)
            parts, _ = blocks_loss(settings, ours, held, FeatureBatch(batch=batch, context_features=context.to(dtype)))
            parts.loss_sum.backward()
            found[dtype] = {name: parameter.grad for name, parameter in ours.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16):
            theirs, loss_num, _ = judged(ours, settings, target_info, tmp_path / str(seed), batch, context, held)
            loss_num.backward()
        for name, right in found[torch.float32].items():
            ours_off, theirs_off = (found[torch.bfloat16][name] - right).norm(), (theirs[name].grad - right).norm()
            logs.append((ours_off / theirs_off).log())
    assert -2 < torch.stack(logs).mean() < 0.1  # rounding is a draw each time, so it is the mean over many that says something


def inputs(make_batch):
    """A batch, context features, embedding and head; all that is random is a number that bf16 has, too."""
    # one document a row, for SpecForge does not pack; blocks overlap and run past the end; the second row has fewer
    batch = make_batch([[LENGTH], [31]], [[2, 3, 9, 20, 38], [4, 17, 29]], num_slots=LENGTH, num_anchors=6)
    generator = torch.Generator().manual_seed(4)
    shapes = (2, LENGTH, 3 * 32), (64, 32), (64, 32)
    context, *ends = (torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes)
    return batch, context, tuple(ends)


def judged(ours, settings, target_info, tmp_path, batch, context, ends):
    """SpecForge's parameters by name, which are those of `ours`, its loss and its sum of weights."""
    draft = importlib.import_module("specforge.modeling.draft.dflash").DFlashDraftModel
    wrapper = importlib.import_module("specforge.algorithms.common.dflash_family_model").OnlineDFlashModel
    folder = save_checkpoint(tmp_path, 1, Staging(ours), target_info)
    theirs = draft.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    theirs.load_state_dict(ours.state_dict())  # the checkpoint rounds
    embedding, head = ends
    decays = settings.optim.loss_weights == "decay"
    lm_head, embed_tokens = torch.nn.Linear(32, 64, bias=False), torch.nn.Embedding(64, 32)
    lm_head.weight, embed_tokens.weight = (torch.nn.Parameter(t, requires_grad=False) for t in (head, embedding))
    judge = wrapper(
        theirs,
        lm_head,
        embed_tokens,
        mask_token_id=63,
        block_size=4,
        attention_backend="sdpa",
        num_anchors=6,
        loss_decay_gamma=settings.loss_gamma if decays else None,
        loss_type="dflash" if decays else "dpace",
    )
    given = batch.anchors, batch.anchor_valid
    judge._sample_anchor_positions = types.MethodType(lambda *_: given, judge)
    _, _, told = judge(batch.tokens, context, batch.loss_mask.float())
    return dict(theirs.named_parameters()), *told["loss_terms"]


@pytest.mark.filterwarnings("ignore")  # of the packages that the judge imports
def test_specforge_trains_as_we_do_on_the_same_batches(tiny_run):
    path = Path(__file__).parents[2] / "experiments" / "baseline.py"
    module = types.ModuleType("baseline")
    exec(compile(path.read_text(), path, "exec"), vars(module))
    settings = TrainConfig.from_dict(tiny_run.config(drafters=2, run={"steps": 6, "validate_every": 6}))
    loaded = load_all(settings)
    told = list(module.train(settings, loaded, 6))
    losses = [event["loss"] for event in told if event["event"] == "step"]
    assert losses == pytest.approx(plain_losses(settings, loaded, 6), rel=1e-4)
    assert [event["step"] for event in told if event["event"] == "validation"] == [6]
    assert told[-1]["acceptance_length"] >= 1
    blind = module.batches

    def every_other(*args):
        for batch in blind(*args):
            yield dataclasses.replace(batch, anchor_valid=batch.anchor_valid & (batch.index % 2 == 0))

    module.batches = every_other
    told = list(module.train(settings, loaded, 2))
    assert all(math.isfinite(event["loss"]) for event in told if event["event"] == "step")
    for sections in ({"draft": {"feature_noise": 0.5}}, {"optim": {"loss_labels": "logits"}}):
        with pytest.raises(ConfigError, match="SpecForge has no "):
            next(module.train(TrainConfig.from_dict(tiny_run.config(**sections)), loaded, 2))
