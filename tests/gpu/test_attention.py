"""flex_attention on CUDA must do what SDPA does under the matrix of the same mask function, gradients included."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.anchors import eligible_anchors, sample_anchors
from trainer.batch import NO_DOCUMENT, Batch
from trainer.model.attention import attend, dense_mask, document_mask, document_mask_mod, draft_mask, draft_mask_mod

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ROWS, SLOTS, ANCHORS, BLOCK = 3, 300, 20, 10


@pytest.fixture(scope="module")
def batch():
    """Three rows: two documents and padding; one document with few eligible anchors; nothing but padding."""
    doc_ids = torch.full((ROWS, SLOTS), NO_DOCUMENT, dtype=torch.int32)
    doc_ids[0, :140], doc_ids[0, 140:280], doc_ids[1] = 0, 1, 0
    positions = torch.arange(SLOTS).repeat(ROWS, 1)
    positions[0, 140:280] -= 140
    loss_mask = (doc_ids != NO_DOCUMENT) & (positions > 10)
    loss_mask[1, 24:] = False
    eligible = eligible_anchors(loss_mask, doc_ids)
    anchors, valid = sample_anchors(eligible, doc_ids, ANCHORS, torch.Generator().manual_seed(0))
    assert valid.sum(dim=1).tolist() == [20, 12, 0]
    tokens = torch.randint(50, (ROWS, SLOTS), generator=torch.Generator().manual_seed(1))
    return Batch(
        index=0,
        tokens=tokens,
        positions=positions * (doc_ids != NO_DOCUMENT),
        doc_ids=doc_ids,
        loss_mask=loss_mask,
        anchors=anchors,
        anchor_valid=valid,
    ).to(CUDA)


def _inputs(num_queries, num_keys, dtype):
    generator = torch.Generator().manual_seed(2)
    shapes = [(ROWS, 6, num_queries, 64), (ROWS, 2, num_keys, 64), (ROWS, 2, num_keys, 64)]
    return [torch.randn(s, generator=generator).to(CUDA, dtype).requires_grad_() for s in shapes]


def _assert_equal(flex_mask, mask_mod, num_queries, num_keys, dtype):
    inputs = _inputs(num_queries, num_keys, dtype)
    matrix = dense_mask(mask_mod, ROWS, num_queries, num_keys, CUDA)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    with sdpa_kernel(SDPBackend.MATH):
        outs = [attend(*inputs, mask, 0.125) for mask in (flex_mask, matrix)]
    torch.testing.assert_close(*outs, **tolerance)
    assert (outs[0].masked_select(~matrix.any(dim=-1, keepdim=True)) == 0).all()
    weights = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(3)).to(CUDA, dtype)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in outs]
    for flex, dense in zip(*gradients, strict=True):
        assert flex.isfinite().all()
        torch.testing.assert_close(flex, dense, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draft_attention_is_the_cpus(batch, dtype):
    queries, keys = ANCHORS * BLOCK, SLOTS + ANCHORS * BLOCK
    _assert_equal(draft_mask(batch, BLOCK), draft_mask_mod(batch, BLOCK), queries, keys, dtype)


@pytest.mark.parametrize("window", [None, 70])
def test_document_attention_is_the_cpus(batch, window):
    mask_mod = document_mask_mod(batch.doc_ids, window)
    _assert_equal(document_mask(batch.doc_ids, window), mask_mod, SLOTS, SLOTS, torch.float32)


def test_another_batch_of_the_same_shape_compiles_nothing(batch):
    inputs = _inputs(ANCHORS * BLOCK, SLOTS + ANCHORS * BLOCK, torch.float32)
    attend(*inputs, draft_mask(batch, BLOCK), 0.125)
    torch._dynamo.utils.counters.clear()
    shifted = batch.to(CUDA)
    shifted.anchors[:2] += 3
    out = attend(*inputs, draft_mask(shifted, BLOCK), 0.125)
    assert not torch._dynamo.utils.counters["stats"]
    matrix = dense_mask(draft_mask_mod(shifted, BLOCK), ROWS, ANCHORS * BLOCK, SLOTS + ANCHORS * BLOCK, CUDA)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(out, attend(*inputs, matrix, 0.125), rtol=1e-4, atol=1e-4)
