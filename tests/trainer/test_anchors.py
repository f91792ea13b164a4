import math

import torch

from trainer.anchors import (
    block_input_ids,
    block_labels,
    block_positions,
    eligible_anchors,
    sample_anchors,
)


def one_document(eligible):
    return torch.zeros(eligible.shape, dtype=torch.int32)


def test_eligible_anchors_and_their_successors_are_responses_of_one_document():
    doc_ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0, 0]])
    loss_mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0], [1, 0, 1, 1, 0, 0, 1, 1]]).bool()
    expected = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0, 1, 0]]).bool()
    assert torch.equal(eligible_anchors(loss_mask, doc_ids), expected)


def test_sampled_anchors_are_eligible_distinct_ascending_and_valid_first():
    eligible = torch.rand(5, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    anchors, valid = sample_anchors(eligible, one_document(eligible), 8, torch.Generator().manual_seed(2))
    assert anchors.shape == valid.shape == (5, 8)
    assert valid.all()
    for row, allowed in zip(anchors.tolist(), eligible, strict=True):
        assert row == sorted(set(row))
        assert allowed[row].all()


def test_a_row_with_few_or_no_eligible_slots_keeps_its_shape():
    eligible = torch.zeros(3, 6, dtype=torch.bool)
    eligible[0, [1, 4]] = True
    eligible[1] = True
    anchors, valid = sample_anchors(eligible, one_document(eligible), 9, torch.Generator().manual_seed(0))
    assert anchors[0].tolist() == [1, 4, 0, 0, 0, 0, 0, 0, 0]
    assert anchors[1].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0]
    assert anchors[2].tolist() == [0] * 9
    assert valid.sum(dim=1).tolist() == [2, 6, 0]
    assert anchors.dtype == torch.int64


def test_sampling_is_uniform_and_leaves_the_global_generator_alone():
    eligible = torch.ones(4000, 10, dtype=torch.bool)
    eligible[:, 3] = False
    documents = (torch.arange(10) >= 6).int().expand(4000, 10)
    before = torch.get_rng_state()
    anchors, _ = sample_anchors(eligible, documents, 3, torch.Generator().manual_seed(0))
    again, _ = sample_anchors(eligible, documents, 3, torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(anchors, again)
    counts = torch.bincount(anchors.flatten(), minlength=10).float() / 4000
    assert counts[3] == 0
    assert (counts[counts > 0] - 3 / 9).abs().max() < 0.03
    pairs = torch.zeros(10, 10)
    for row in anchors.tolist():
        pairs[row[0], row[1]] += 1
    assert (pairs > 0).sum() >= 20  # not a few fixed patterns


def test_each_document_gets_the_anchors_that_its_response_tokens_deserve():
    lengths = [3, 40, 1, 20, 0, 36]  # eligible slots of six documents
    documents = torch.repeat_interleave(torch.arange(6, dtype=torch.int32), torch.tensor([10, 50, 10, 30, 10, 40]))[None]
    eligible = torch.zeros(1, 150, dtype=torch.bool)
    for document, length in enumerate(lengths):
        eligible[0, int((documents[0] < document).sum()) :][:length] = True
    totals = torch.zeros(6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        anchors, valid = sample_anchors(eligible, documents, 25, generator)
        assert valid.all()
        counts = torch.bincount(documents[0, anchors[0]], minlength=6)
        shares = torch.tensor(lengths) * 25 / 100
        assert ((counts >= shares.floor()) & (counts <= shares.ceil())).all()
        totals += counts
    assert (totals / 300 - shares).abs().max() < 0.1  # what is rounded is rounded fairly


def test_blocks_are_fed_the_anchor_then_mask_tokens_at_counted_positions(make_batch):
    batch = make_batch([[6, 8]], [[3, 8]], num_slots=16, num_anchors=3)
    ids = block_input_ids(batch, 4, mask_token_id=63)
    assert ids[0, 0].tolist() == [int(batch.tokens[0, 3]), 63, 63, 63]
    assert ids[0, 1].tolist() == [int(batch.tokens[0, 8]), 63, 63, 63]
    assert block_positions(batch, 4)[0].tolist() == [[3, 4, 5, 6], [2, 3, 4, 5], [0, 1, 2, 3]]


def test_labels_and_weights_against_their_definition(make_batch):
    batch = make_batch([[6, 7], [16]], [[3, 4, 9, 11], [2, 13, 14]], num_slots=16, num_anchors=5, prompt=0)
    batch.loss_mask[1, 4] = False  # a user's turn inside the row's only document
    gamma, block_size = 4.0, 4
    labels, weights = block_labels(batch, block_size, gamma)
    assert (labels.shape, weights.shape) == ((2, 5, 4), (2, 5, 4))
    assert weights.dtype == torch.float32
    for b in range(2):
        for n in range(5):
            anchor = int(batch.anchors[b, n])
            for k in range(block_size):
                slot = anchor + k
                counts = k > 0 and bool(batch.anchor_valid[b, n]) and slot < 16 and bool(batch.loss_mask[b, slot])
                counts = counts and batch.doc_ids[b, slot] == batch.doc_ids[b, anchor]
                expected = math.exp(-(k - 1) / gamma) if counts else 0.0
                assert math.isclose(weights[b, n, k], expected, rel_tol=1e-6), (b, n, k)
                assert not counts or labels[b, n, k] == batch.tokens[b, slot]
    assert weights[0, 1].tolist() == [0.0, 1.0, 0.0, 0.0], "slot 4 of a six-token document has one successor"
