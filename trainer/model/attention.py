"""Who attends to whom, said once: a mask function that flex_attention compiles on CUDA and SDPA gets as a matrix on CPU.

flex_attention has no backward on CPU (torch 2.13), so the device decides: `make_mask` turns one mask function into a
BlockMask on CUDA and into a matrix elsewhere, and `attend` takes either. Called by every target and drafter thread; the
compiled kernel is made on first use. Shape legend: `trainer.batch`.

Sources: DFlash (arXiv 2602.06036); torch.nn.attention.flex_attention.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainer.batch import Batch

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query, key) indices -> bool, broadcast together."""

AttentionMask = BlockMask | Tensor
"""What `attend` takes; a tensor is [B, 1, Q, KV] bool."""


def draft_mask_mod(batch: Batch, block_size: int) -> MaskMod:
    """The drafter's mask: keys are the row's S context slots, then its N*K block slots; queries are the block slots.

    A query of a valid block sees its whole block, both ways, and the context of its document strictly before the
    anchor: at inference the target has not read the anchor yet. An invalid block sees nothing.
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

    return mask_mod


def document_mask_mod(doc_ids_BS: Tensor, window: int | None = None) -> MaskMod:
    """The target's mask in a packed row: causal inside a document; `window` counts the slots seen, the own included."""

    def causal(b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (doc_ids_BS[b, q] == doc_ids_BS[b, kv]) & (kv <= q)

    if window is None:
        return causal

    def sliding(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return causal(b, h, q, kv) & (q - kv < window)

    return sliding


def draft_mask(batch: Batch, block_size: int) -> AttentionMask:
    """The drafter's mask for a batch on the batch's device."""
    num_rows, num_slots = batch.tokens.shape
    num_queries = batch.anchors.shape[1] * block_size
    mask_mod = draft_mask_mod(batch, block_size)
    return make_mask(mask_mod, num_rows, num_queries, num_slots + num_queries, batch.tokens.device)


def document_mask(doc_ids_BS: Tensor, window: int | None = None) -> AttentionMask:
    """The target's mask for packed rows on the device of `doc_ids_BS`."""
    num_rows, num_slots = doc_ids_BS.shape
    return make_mask(document_mask_mod(doc_ids_BS, window), num_rows, num_slots, num_slots, doc_ids_BS.device)


def make_mask(mask_mod: MaskMod, num_rows: int, num_queries: int, num_keys: int, device: torch.device) -> AttentionMask:
    """What `attend` takes on `device`: a BlockMask on CUDA, a matrix elsewhere."""
    if device.type == "cuda":
        return create_block_mask(mask_mod, num_rows, None, num_queries, num_keys, device=device)
    return dense_mask(mask_mod, num_rows, num_queries, num_keys, device)


def dense_mask(mask_mod: MaskMod, num_rows: int, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """`mask_mod` for every row, query and key: [B, 1, Q, KV] bool."""
    rows, queries, keys = (torch.arange(n, device=device) for n in (num_rows, num_queries, num_keys))
    head = torch.zeros((), dtype=torch.int64, device=device)
    return mask_mod(rows[:, None, None, None], head, queries[:, None], keys)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, scale: float) -> Tensor:
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
