"""Who attends to whom, said once: a mask function that flex_attention compiles on CUDA and SDPA gets as a matrix on CPU.

flex_attention has no backward on CPU (torch 2.13), so the device decides: masks are BlockMasks on CUDA and matrices elsewhere,
and `attend` takes either. Which tiles of a BlockMask hold anything follows from where documents and anchors lie; the mask
function is never evaluated for all queries and keys, nothing is synchronised, and a CUDA graph can hold it all. Called by every
target and drafter thread; the compiled kernel is made on first use. Shape legend: `trainer.batch`; I and J count the tiles of
queries and keys.

Sources: DFlash (arXiv 2602.06036); torch.nn.attention.flex_attention.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.batch import Batch

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query, key) indices -> bool, broadcast together."""

AttentionMask = BlockMask | Tensor
"""What `attend` takes; a tensor is [B, 1, Q, KV] bool."""

MASK_TILE = 128
"""Queries and keys of a tile."""


def draft_mask_mod(batch: Batch, block_size: int, window: int | None = None) -> MaskMod:
    """The drafter's mask: keys are the row's S context slots, then its N*K block slots; queries are the block slots.

    A query of a valid block sees its whole block, both ways, and the context of its document strictly before the
    anchor: at inference the target has not read the anchor yet. An invalid block sees nothing. In a layer with a window
    (at least `block_size`), which counts the slots seen, the own included, a query sees nothing behind itself either.
    """
    num_slots = batch.tokens.shape[1]
    end_BN = batch.anchors
    start_BN = end_BN - batch.positions.gather(1, batch.anchors)
    valid_BN = batch.anchor_valid

    def mask_mod(b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = q // block_size
        context = (kv >= start_BN[b, block]) & (kv < end_BN[b, block])
        own_block = (kv >= num_slots) & ((kv - num_slots) // block_size == block)
        return valid_BN[b, block] & (context | own_block)

    if window is None:
        return mask_mod

    def sliding(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # slots behind the context count from the anchor on, as positions do
        slot = torch.where(kv < num_slots, kv, end_BN[b, q // block_size] + (kv - num_slots) % block_size)
        distance = end_BN[b, q // block_size] + q % block_size - slot
        return mask_mod(b, h, q, kv) & (distance >= 0) & (distance < window)

    return sliding


def document_mask_mod(doc_ids_BS: Tensor, window: int | None = None) -> MaskMod:
    """The target's mask in a packed row: causal inside a document; `window` counts the slots seen, the own included."""

    def causal(b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (doc_ids_BS[b, q] == doc_ids_BS[b, kv]) & (kv <= q)

    if window is None:
        return causal

    def sliding(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return causal(b, h, q, kv) & (q - kv < window)

    return sliding


def draft_mask(batch: Batch, block_size: int, window: int | None = None) -> AttentionMask:
    """The drafter's mask for a batch on the batch's device."""
    num_rows, num_slots = batch.tokens.shape
    num_queries = batch.anchors.shape[1] * block_size
    mask_mod = draft_mask_mod(batch, block_size, window)
    if not batch.tokens.is_cuda:
        return dense_mask(mask_mod, num_rows, num_queries, num_slots + num_queries, batch.tokens.device)
    return block_mask(*draft_tiles(batch, block_size, window), mask_mod, num_queries, num_slots + num_queries)


def decoding_mask(length: Tensor, num_slots: int, block_size: int, window: int | None) -> Tensor:
    """`draft_mask` for one block behind a context of `length` ([1] int64) of `num_slots` slots: [1, 1, K, num_slots+K] bool."""
    k = torch.arange(block_size, device=length.device)
    slots = torch.arange(num_slots, device=length.device)
    exists = torch.cat((slots < length, k >= 0))
    if window is None:
        return exists.expand(1, 1, block_size, -1)
    distance = (length + k)[:, None] - torch.cat((slots, length + k))
    return (exists & (distance >= 0) & (distance < window))[None, None]


def document_mask(doc_ids_BS: Tensor, window: int | None = None) -> AttentionMask:
    """The target's mask for packed rows on the device of `doc_ids_BS`."""
    num_rows, num_slots = doc_ids_BS.shape
    mask_mod = document_mask_mod(doc_ids_BS, window)
    if not doc_ids_BS.is_cuda:
        return dense_mask(mask_mod, num_rows, num_slots, num_slots, doc_ids_BS.device)
    return block_mask(*document_tiles(doc_ids_BS, window), mask_mod, num_slots, num_slots)


def draft_tiles(batch: Batch, block_size: int, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Tiles of `draft_mask_mod` that hold anything and, among them, tiles that are full: two [B, I, J] bool.

    With a window a few tiles at its edge may count though they hold nothing.
    """
    device, num_slots = batch.tokens.device, batch.tokens.shape[1]
    num_queries = batch.anchors.shape[1] * block_size
    tiles_J = torch.arange(-(-(num_slots + num_queries) // MASK_TILE), device=device)
    tiles_I = torch.arange(-(-num_queries // MASK_TILE), device=device)
    first_query_N = torch.arange(0, num_queries, block_size, device=device)
    in_tile_IN = _overlap(tiles_I[:, None], first_query_N, first_query_N + block_size).float()

    end_BN1 = batch.anchors[:, :, None]
    start_BN1 = end_BN1 - batch.positions.gather(1, batch.anchors)[:, :, None]
    all_see_BN1 = start_BN1  # from where on every query of the block sees the context
    if window is not None:
        all_see_BN1 = torch.maximum(start_BN1, end_BN1 + block_size - window)
        start_BN1 = torch.maximum(start_BN1, end_BN1 + 1 - window)
    first_key_N1 = num_slots + first_query_N[:, None]
    context_BNJ = _overlap(tiles_J, start_BN1, end_BN1)
    own_block_BNJ = _overlap(tiles_J, first_key_N1, first_key_N1 + block_size)
    valid_BN1 = batch.anchor_valid[:, :, None]
    covered_BNJ = valid_BN1 & (all_see_BN1 <= tiles_J * MASK_TILE) & (end_BN1 >= (tiles_J + 1) * MASK_TILE)

    seen_BIJ = in_tile_IN @ (valid_BN1 & (context_BNJ | own_block_BNJ)).float() > 0
    whole_I = (tiles_I + 1) * MASK_TILE <= num_queries
    full_BIJ = (in_tile_IN @ covered_BNJ.float() == in_tile_IN.sum(dim=1, keepdim=True)) & whole_I[:, None]
    return seen_BIJ, full_BIJ


def _overlap(tiles: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Whether a tile and start..end (exclusive) share a slot, broadcast together."""
    return (tiles * MASK_TILE < end) & ((tiles + 1) * MASK_TILE > start) & (start < end)


def document_tiles(doc_ids_BS: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Tiles of `document_mask_mod` that hold anything and, among them, tiles that are full: two [B, I, J] bool."""
    num_slots = doc_ids_BS.shape[1]
    slots_S = torch.arange(num_slots, device=doc_ids_BS.device)
    begins_BS = torch.nn.functional.pad(doc_ids_BS[:, 1:] != doc_ids_BS[:, :-1], (1, 0), value=True)
    first_seen_BS = torch.where(begins_BS, slots_S, 0).cummax(dim=1).values
    if window is not None:
        first_seen_BS = torch.maximum(first_seen_BS, slots_S - (window - 1))
    start_I = slots_S[::MASK_TILE]
    last_I = (start_I + MASK_TILE - 1).clamp(max=num_slots - 1)
    seen_BIJ = (start_I <= start_I[:, None]) & (start_I + MASK_TILE > first_seen_BS[:, start_I][:, :, None])
    whole_I = start_I + MASK_TILE <= num_slots
    covered_BIJ = start_I >= first_seen_BS[:, last_I][:, :, None]
    return seen_BIJ, covered_BIJ & (start_I < start_I[:, None]) & whole_I[:, None]


def block_mask(seen_BIJ: Tensor, full_BIJ: Tensor, mask_mod: MaskMod, num_queries: int, num_keys: int) -> BlockMask:
    """A BlockMask that evaluates `mask_mod` in tiles that are seen but not full."""
    partial_B1IJ, full_B1IJ = (seen_BIJ & ~full_BIJ)[:, None], full_BIJ[:, None]
    kv_num_blocks, kv_indices = _ordered(partial_B1IJ)
    full_kv_num_blocks, full_kv_indices = _ordered(full_B1IJ)
    q_num_blocks, q_indices = _ordered(partial_B1IJ.mT)
    full_q_num_blocks, full_q_indices = _ordered(full_B1IJ.mT)
    return BlockMask(
        seq_lengths=(num_queries, num_keys),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(MASK_TILE, MASK_TILE),
        mask_mod=mask_mod,
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """(number of set tiles of each row, their columns first) in int32, contiguous: the kernels read nothing else right."""
    columns = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32).contiguous(), columns.to(torch.int32).contiguous()


def dense_mask(mask_mod: MaskMod, num_rows: int, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """`mask_mod` for every row, query and key: [B, 1, Q, KV] bool."""
    rows, queries, keys = (torch.arange(n, device=device) for n in (num_rows, num_queries, num_keys))
    head = torch.zeros((), dtype=torch.int64, device=device)
    return mask_mod(rows[:, None, None, None], head, queries[:, None], keys)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask | None, scale: float) -> Tensor:
    """Grouped-query attention; a query without keys gives zeros, in SDPA (since torch 2.5) as in flex_attention.

    `query` [B, H, Q, C], `key` and `value` [B, G, KV, C] with G dividing H -> [B, H, Q, C].
    """
    grouped = query.shape[1] != key.shape[1]
    if isinstance(mask, BlockMask):
        flex: Callable[..., Tensor] = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
        return flex(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
