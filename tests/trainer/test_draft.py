"""The draft model, judged by z-lab's own class: training on all blocks at once must equal drafting one block at a time."""

import dataclasses

import pytest
import torch
from dflash.model import DFlashDraftModel, build_target_layer_ids

from trainer.batch import FeatureBatch
from trainer.checkpoint import Staging, save_checkpoint
from trainer.config import DraftConfig
from trainer.errors import ConfigError
from trainer.model.attention import dense_mask, draft_mask
from trainer.model.draft import build_draft, draft_masks, forward_blocks, resolve_draft, resolve_target_layer_ids

CPU = torch.device("cpu")


@pytest.fixture
def batch(make_batch):
    """Two packed rows; blocks overlap, run past their document and past the row, and one starts a document."""
    return make_batch([[9, 7], [5, 13]], [[3, 4, 6, 9, 14], [4, 7, 8, 17]], num_slots=18, num_anchors=6)


@pytest.fixture
def features(batch):
    generator = torch.Generator().manual_seed(5)
    return FeatureBatch(batch=batch, context_features=torch.randn(2, 18, 3 * 32, generator=generator))


@pytest.fixture
def embedding():
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(6))


@pytest.fixture(params=[(None, None), (5, None), (4, 4)], ids=["full", "sliding and full", "sliding"])
def judged(make_spec, make_drafter, target_info, tmp_path, request):
    """A drafter with weights that bf16 holds exactly, and z-lab's class with the same weights out of our checkpoint."""
    model = make_drafter(make_spec(layer_windows=request.param))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    folder = save_checkpoint(tmp_path, 1, Staging(model), target_info)
    judge, loaded = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loaded.values()), loaded
    return model, judge.eval()


def _draft_one_by_one(judge, features, embedding, b, n):
    """z-lab's inference: the context of the anchor's document strictly before the anchor, then the block."""
    batch, block_size = features.batch, judge.block_size
    anchor = int(batch.anchors[b, n])
    position = int(batch.positions[b, anchor])
    block = torch.full((1, block_size), judge.mask_token_id)
    block[0, 0] = batch.tokens[b, anchor]
    return judge(
        position_ids=torch.arange(position + block_size)[None],
        noise_embedding=torch.nn.functional.embedding(block, embedding),
        target_hidden=features.context_features[b : b + 1, anchor - position : anchor],
    )[0]


@torch.no_grad()
def test_training_on_all_blocks_equals_z_labs_inference_block_by_block(judged, features, embedding):
    model, judge = judged
    batch = features.batch
    hidden = forward_blocks(model, embedding, features, draft_masks(batch, model.spec))
    assert hidden.shape == (2, 6, 4, 32)
    for b, n in batch.anchor_valid.nonzero().tolist():
        expected = _draft_one_by_one(judge, features, embedding, b, n)
        torch.testing.assert_close(hidden[b, n], expected, rtol=1e-5, atol=1e-5, msg=lambda m, b=b, n=n: f"{b} {n}: {m}")


def _sees_the_anchor(b, q, kv, batch):
    return (kv < 18) & (kv == batch.anchors[b, q // 4])


def _sees_another_block(_b, q, kv, _batch):
    return (kv >= 18) & ((kv - 18) // 4 == q // 4 - 1)


def _sees_another_document(b, q, kv, batch):
    return (kv < 18) & (kv == 0) & (batch.anchors[b, q // 4] > 0)


@torch.no_grad()
@pytest.mark.parametrize("leak", [_sees_the_anchor, _sees_another_block, _sees_another_document])
def test_the_judge_notices_a_leaking_mask(judged, features, embedding, leak):
    model, judge = judged
    batch = features.batch
    masks = {
        window: dense_mask(lambda b, h, q, kv, right=right: right[b, h, q, kv] | leak(b, q, kv, batch), 2, 24, 18 + 24, CPU)
        for window, right in draft_masks(batch, model.spec).items()
    }
    hidden = forward_blocks(model, embedding, features, masks)
    errors = [
        (hidden[b, n] - _draft_one_by_one(judge, features, embedding, b, n)).abs().max()
        for b, n in batch.anchor_valid.nonzero().tolist()
    ]
    assert max(errors) > 1e-2


def test_invalid_blocks_and_padding_do_not_move_anything(make_spec, make_drafter, features, embedding):
    model = make_drafter(make_spec())
    batch = features.batch

    def gradients(batch, context):
        hidden = forward_blocks(
            model, embedding, FeatureBatch(batch=batch, context_features=context), {None: draft_mask(batch, 4)}
        )
        return torch.autograd.grad(hidden[batch.anchor_valid].square().sum(), list(model.parameters()))

    dirty_context = features.context_features.clone()
    dirty_context[batch.doc_ids < 0] = 1e4
    dirty = dataclasses.replace(batch, anchors=torch.where(batch.anchor_valid, batch.anchors, 7))
    for clean, other in zip(gradients(batch, features.context_features), gradients(dirty, dirty_context), strict=True):
        assert clean.isfinite().all()
        torch.testing.assert_close(clean, other)


def test_every_parameter_learns_and_nothing_else_is_one(make_spec, make_drafter, features, embedding):
    model = make_drafter(make_spec())
    embedding.requires_grad_(False)
    forward_blocks(model, embedding, features, {None: draft_mask(features.batch, 4)}).square().sum().backward()
    assert len(list(model.parameters())) == 3 + 11 * 2 == len(model.state_dict())
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_bf16_computes_near_fp32_from_the_same_fp32_masters(make_spec, features, embedding):
    spec = make_spec(dtype=torch.bfloat16)
    model, exact = build_draft(spec, 0, CPU), build_draft(make_spec(), 0, CPU)
    mask = {None: draft_mask(features.batch, 4)}
    hidden = forward_blocks(model, embedding.bfloat16(), features, mask)
    assert hidden.dtype == torch.bfloat16
    reference = forward_blocks(exact, embedding, features, mask)
    assert (hidden.float() - reference)[features.batch.anchor_valid].abs().max() < 5e-2
    hidden.float().square().sum().backward()
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_drafters_start_equal_without_the_global_generator(make_spec):
    before = torch.get_rng_state()
    one, same, other = (build_draft(make_spec(), seed, CPU).state_dict() for seed in (7, 7, 8))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert one["fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert (one["layers.1.self_attn.q_norm.weight"] == 1).all()


@pytest.mark.parametrize(("num_target_layers", "num_layers"), [(36, 5), (36, 1), (28, 4), (30, 5), (64, 8), (8, 3)])
def test_tapped_layers_are_z_labs_by_default(num_target_layers, num_layers):
    ids = resolve_target_layer_ids(DraftConfig(num_layers=num_layers), num_target_layers)
    assert list(ids) == build_target_layer_ids(num_target_layers, num_layers)
    if (num_target_layers, num_layers) == (36, 5):
        assert ids == (1, 9, 17, 25, 33)


@pytest.mark.parametrize(
    ("num_target_layers", "config", "sentence"),
    [
        (4, DraftConfig(), r"draft.target_layer_ids must be different layers in 0..2, for the target has 4, got .*default"),
        (8, DraftConfig(target_layer_ids=[1, 7]), r"in 0..6, for the target has 8, got \[1, 7\]$"),
    ],
)
def test_layers_that_cannot_be_tapped_are_refused(num_target_layers, config, sentence):
    with pytest.raises(ConfigError, match=sentence):
        resolve_target_layer_ids(config, num_target_layers)


def test_the_shape_is_the_targets_unless_configured(target_info):
    spec = resolve_draft(DraftConfig(num_layers=2, dtype="float32"), target_info, 63)
    assert (spec.hidden_size, spec.intermediate_size, spec.num_attention_heads, spec.head_dim) == (32, 48, 4, 16)
    assert (spec.rope_theta, spec.target_layer_ids, spec.mask_token_id) == (10000.0, (1, 5), 63)
    config = DraftConfig(num_layers=2, num_attention_heads=3, num_key_value_heads=3, head_dim=8, intermediate_size=20)
    spec = resolve_draft(config, target_info, 63)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.intermediate_size) == (3, 3, 8, 20)
    with pytest.raises(ConfigError, match=r"draft.num_attention_heads must be a multiple of the 2 .* got 3"):
        resolve_draft(DraftConfig(num_layers=2, num_attention_heads=3), target_info, 63)
    with pytest.raises(ConfigError, match=r"draft.head_dim must be even .* got 7"):
        resolve_draft(DraftConfig(num_layers=2, head_dim=7), target_info, 63)
