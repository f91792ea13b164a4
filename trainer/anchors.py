"""Which tokens start a block, and what a block is fed, placed at and compared with.

A module of its own because the prefetcher samples and the drafter labels. Plain tensor functions without
synchronisation; any thread may call them. Shapes are static: what does not exist is marked, never cut off. Shape
legend: `trainer.batch`.

Source: DFlash (arXiv 2602.06036), as SpecForge trains it.
"""

import torch
from torch import Tensor

from trainer.batch import Batch


def eligible_anchors(loss_mask_BS: Tensor, doc_ids_BS: Tensor) -> Tensor:
    """[B, S] bool: slots whose token and successor are response tokens of the same document."""
    response = loss_mask_BS[:, :-1] & loss_mask_BS[:, 1:]
    same_document = doc_ids_BS[:, :-1] == doc_ids_BS[:, 1:]
    return torch.nn.functional.pad(response & same_document, (0, 1), value=False)


def sample_anchors(
    eligible_BS: Tensor, doc_ids_BS: Tensor, num_anchors: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `num_anchors` eligible slots of each row without replacement, or all if there are fewer.

    Each document gets its share of the row's eligible slots, rounded up or down, and every slot has the same chance: a
    systematic sample of the slots, which stand document by document and within one in random order. Returns anchors [B, N]
    int64, ascending, 0 where there was none left, and valid [B, N] bool, valid ones first. `generator` lives on the device of
    the tensors.
    """
    num_rows, num_slots = eligible_BS.shape
    device = eligible_BS.device
    keys_BS = doc_ids_BS + torch.rand(eligible_BS.shape, dtype=torch.float64, generator=generator, device=device)
    order_BS = keys_BS.masked_fill(~eligible_BS, torch.inf).argsort(dim=1)
    count_B1 = eligible_BS.sum(dim=1, keepdim=True)
    start_B1 = torch.rand((num_rows, 1), dtype=torch.float64, generator=generator, device=device)
    step_B1 = (count_B1.double() / num_anchors).clamp(min=1)
    drawn_BN = ((start_B1 + torch.arange(num_anchors, device=device)) * step_B1).long()
    slots_BN = order_BS.gather(1, drawn_BN.clamp(max=num_slots - 1))
    slots_BN = torch.where(drawn_BN < count_B1, slots_BN, num_slots).sort(dim=1).values
    valid_BN = slots_BN < num_slots
    return slots_BN.masked_fill(~valid_BN, 0), valid_BN


def block_slots(batch: Batch, block_size: int) -> Tensor:
    """[B, N, K] int64: the slot of each block position; it may lie past the row's or the document's end."""
    return batch.anchors[:, :, None] + torch.arange(block_size, device=batch.anchors.device)


def block_input_ids(batch: Batch, block_size: int, mask_token_id: int) -> Tensor:
    """[B, N, K] int64: the anchor's token, then mask tokens."""
    anchor_tokens_BN1 = batch.tokens.gather(1, batch.anchors)[:, :, None]
    return torch.nn.functional.pad(anchor_tokens_BN1, (0, block_size - 1), value=mask_token_id)


def block_positions(batch: Batch, block_size: int) -> Tensor:
    """[B, N, K] int64: the anchor's position in its document, counted on."""
    anchor_positions_BN = batch.positions.gather(1, batch.anchors)
    return anchor_positions_BN[:, :, None] + torch.arange(block_size, device=batch.anchors.device)


def block_labels(batch: Batch, block_size: int, gamma: float) -> tuple[Tensor, Tensor]:
    """Token ids that the block's outputs are compared with, and how much each counts.

    Slot k predicts the token k after the anchor and weighs exp(-(k-1)/gamma) where that is a response token of the
    anchor's document; slot 0, invalid blocks and everything else weigh 0. Returns labels [B, N, K] int64 and weights
    [B, N, K] float32.
    """
    num_slots = batch.tokens.shape[1]
    slots_BNK = block_slots(batch, block_size)
    inside_BNK = slots_BNK < num_slots
    flat_BQ = slots_BNK.clamp(max=num_slots - 1).flatten(1)
    labels_BNK = batch.tokens.gather(1, flat_BQ).view_as(slots_BNK)
    response_BNK = batch.loss_mask.gather(1, flat_BQ).view_as(slots_BNK)
    documents_BNK = batch.doc_ids.gather(1, flat_BQ).view_as(slots_BNK)
    same_document_BNK = documents_BNK == batch.doc_ids.gather(1, batch.anchors)[:, :, None]
    counts_BNK = batch.anchor_valid[:, :, None] & inside_BNK & response_BNK & same_document_BNK
    return labels_BNK, counts_BNK * slot_weights(block_size, gamma, batch.tokens.device)


def slot_weights(block_size: int, gamma: float, device: torch.device) -> Tensor:
    """[K] float32: 0 for the anchor, then exp(-(k-1)/gamma)."""
    k = torch.arange(block_size, device=device)
    return torch.where(k > 0, torch.exp(-(k - 1).float() / gamma), 0.0)
