import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from trainer.model.attention import (
    attend,
    block_mask,
    dense_mask,
    document_mask,
    document_mask_mod,
    document_tiles,
    draft_mask,
    draft_mask_mod,
    draft_tiles,
)


@pytest.fixture
def batch(make_batch):
    """Overlapping anchors, several documents, padding, invalid blocks, and a row that is all padding."""
    rows = [[9, 7], [5, 4, 6], []]
    return make_batch(rows, [[2, 3, 4, 11, 15], [0, 5, 10], []], num_slots=18, num_anchors=6)


def test_draft_mask_against_a_brute_force_reading_of_its_definition(batch):
    block_size, num_slots = 4, 18
    mask = draft_mask(batch, block_size)
    assert mask.shape == (3, 1, 24, 18 + 24)
    for b, q, kv in itertools.product(range(3), range(24), range(42)):
        n = q // block_size
        anchor = int(batch.anchors[b, n])
        in_context = kv < num_slots and kv < anchor and batch.doc_ids[b, kv] == batch.doc_ids[b, anchor]
        in_block = kv >= num_slots and (kv - num_slots) // block_size == n
        expected = bool(batch.anchor_valid[b, n]) and (in_context or in_block)
        assert bool(mask[b, 0, q, kv]) == expected, (b, q, kv)


@pytest.mark.parametrize("window", [4, 6, 40])
def test_a_sliding_layer_sees_a_window_and_nothing_behind_itself(batch, window):
    block_size, num_slots = 4, 18
    mask = draft_mask(batch, block_size, window)
    for b, q, kv in itertools.product(range(3), range(24), range(42)):
        n, offset = divmod(q, block_size)
        anchor = int(batch.anchors[b, n])
        in_context = kv < num_slots and kv < anchor and batch.doc_ids[b, kv] == batch.doc_ids[b, anchor]
        seen = in_context and anchor + offset - kv < window
        if kv >= num_slots:
            seen = (kv - num_slots) // block_size == n and (kv - num_slots) % block_size <= offset
        assert bool(mask[b, 0, q, kv]) == (bool(batch.anchor_valid[b, n]) and bool(seen)), (b, q, kv)


@pytest.mark.parametrize("window", [None, 3])
def test_document_mask_against_a_brute_force_reading_of_its_definition(batch, window):
    mask = document_mask(batch.doc_ids, window)
    for b, q, kv in itertools.product(range(3), range(18), range(18)):
        expected = batch.doc_ids[b, q] == batch.doc_ids[b, kv] and kv <= q and (window is None or q - kv < window)
        assert bool(mask[b, 0, q, kv]) == bool(expected), (b, q, kv)


def test_flex_attention_reads_the_mask_functions_as_the_matrix_does(batch):
    cpu = torch.device("cpu")
    for mask_mod, queries, keys in [(draft_mask_mod(batch, 4), 24, 42), (document_mask_mod(batch.doc_ids, 5), 18, 18)]:
        mask = dense_mask(mask_mod, 3, queries, keys, cpu)
        assert torch.equal(mask, create_mask(mask_mod, 3, 1, queries, keys, device="cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [2, 4])
def test_attend_is_grouped_softmax_attention_with_zeros_for_invalid_blocks(batch, dtype, groups):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4, 24, 8), (3, groups, 42, 8), (3, groups, 42, 8)]
    query, key, value = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    mask = draft_mask(batch, 4)
    out = attend(query, key, value, mask, 0.25)

    keys, values = (x.double().repeat_interleave(4 // groups, dim=1) for x in (key, value))
    scores = query.double() @ keys.transpose(2, 3) * 0.25
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).nan_to_num()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), weights @ values, rtol=tolerance, atol=tolerance)

    invalid = ~batch.anchor_valid.repeat_interleave(4, dim=1)
    assert (out.transpose(1, 2)[invalid] == 0).all()
    for gradient in torch.autograd.grad(out.square().sum(), (query, key, value)):
        assert gradient.isfinite().all()
        assert (gradient[2] == 0).all(), "a row without valid blocks moves nothing"


def _tiles(mask):
    """(seen, full) of torch's own mask, [B, I, J] bool."""
    num_columns = mask.kv_indices.shape[-1]
    sets = []
    for counts, columns in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        listed = torch.arange(num_columns) < counts[..., None]
        dense = torch.zeros(*counts.shape, num_columns, dtype=torch.int32)
        sets.append(dense.scatter_add(-1, columns.long(), listed.int())[:, 0].bool())
    return sets[0] | sets[1], sets[1]


@pytest.mark.parametrize(("block_size", "num_anchors"), [(16, 40), (10, 30), (64, 12)])
def test_tiles_are_those_that_torch_finds_by_evaluating_the_whole_mask(make_batch, block_size, num_anchors):
    rows = [[700], [150, 400, 30], [300], []]
    anchors = [sorted({5 + 17 * n for n in range(num_anchors)}), [10, 140, 160, 500, 549, 560], [299], []]
    batch = make_batch(rows, anchors, num_slots=700, num_anchors=num_anchors)
    queries = num_anchors * block_size
    mask = create_block_mask(draft_mask_mod(batch, block_size), 4, None, queries, 700 + queries, device="cpu")
    for ours, theirs in zip(draft_tiles(batch, block_size), _tiles(mask), strict=True):
        assert torch.equal(ours, theirs)
    for window in (None, 1, 70, 300):
        mask = create_block_mask(document_mask_mod(batch.doc_ids, window), 4, None, 700, 700, device="cpu")
        seen, full = _tiles(mask)
        assert full.any() == (window in (None, 300))
        for ours, theirs in zip(document_tiles(batch.doc_ids, window), (seen, full), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("window", [64, 128, 200, 400, 2000])
def test_sliding_tiles_leave_out_nothing_and_are_full_only_where_all_is_seen(make_batch, window):
    anchors = [sorted({5 + 17 * n for n in range(40)}), [10, 140, 160, 500, 549, 560], [299], []]
    batch = make_batch([[700], [150, 400, 30], [300], []], anchors, num_slots=700, num_anchors=40)
    queries = 40 * 16
    mask = create_block_mask(draft_mask_mod(batch, 16, window), 4, None, queries, 700 + queries, device="cpu")
    seen, full = draft_tiles(batch, 16, window)
    all_seen, all_full = _tiles(mask)
    assert (seen | ~all_seen).all()
    assert (all_full | ~full).all()
    assert seen.sum() <= 1.25 * all_seen.sum()  # a few at the edge
    assert full.any() == (window >= 400)


def test_a_block_mask_holds_contiguous_tensors_in_the_order_of_torchs_own(make_batch):
    batch = make_batch([[150, 400, 30], [600]], [[10, 300], [5, 400]], num_slots=600, num_anchors=20)
    ours = block_mask(*draft_tiles(batch, 16), draft_mask_mod(batch, 16), 320, 920)
    theirs = create_block_mask(draft_mask_mod(batch, 16), 2, None, 320, 920, device="cpu")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        for mine, his in ((getattr(ours, f), getattr(theirs, f)) for f in (name, name.replace("kv", "q"))):
            assert mine.is_contiguous()
            assert torch.equal(mine, his)
