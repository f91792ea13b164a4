"""Target and drafter as they decode: keys and values lie in caches that never move, so that a graph can hold a step.

Rows are texts that grow at their own pace. What a step reads follows `lengths`, a tensor, and nothing is ever taken back: slots
behind a row's length are not seen and are written over. Hugging Face's decoder layers do the target's work, with an attention
of ours that folds the query heads of a group into its queries, so that keys are not copied for each of them. Shape legend:
`trainer.batch`; R counts rows, T tokens read at once, G key and value heads, C their width.

Each object belongs to one thread; while it reads, the model's attention is this one.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from trainer.errors import DataError
from trainer.model.attention import decoding_mask
from trainer.model.draft import DraftModel

_ATTENTION = "cached_rows"


class RowCache:
    """Keys and values of every layer, [R, G, max_tokens, C] each; a Hugging Face cache as far as layers call it."""

    def __init__(self, config: Any, num_rows: int, max_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """Room for the layers of a Hugging Face configuration; raises DataError if there is none."""
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, num_rows, config.num_key_value_heads, max_tokens, width)
        try:
            self._keys, self._values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        except RuntimeError:  # torch's for too little memory
            gib = 2 * math.prod(shape) * dtype.itemsize / 2**30
            needed = f"keys and values of {num_rows} rows of {max_tokens} tokens need {gib:.1f} GiB"
            raise DataError(f"{needed}, which {device} does not have; take fewer rows or tokens") from None
        self._positions: Tensor | None = None
        self._num_keys = 0

    def store(self, places: Sequence[int], other: "RowCache") -> None:
        """Make these rows what the rows of another cache, not longer than this, are."""
        for held, new in ((self._keys, other._keys), (self._values, other._values)):
            held[:, list(places), :, : new.shape[3]] = new

    def point_at(self, positions_RT: Tensor | None, num_keys: int) -> None:
        """Where the next tokens of each row are written, None: from the start on; and how many keys are shown."""
        self._positions, self._num_keys = positions_RT, num_keys

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Add T tokens of every row, [R, G, T, C] each; returns all that are shown."""
        shown = []
        for held, new in ((self._keys[layer], keys), (self._values[layer], values)):
            if self._positions is None:
                held[:, :, : new.shape[2]] = new
                shown.append(new)
            else:
                rows = torch.arange(len(held), device=held.device)[:, None]
                held.transpose(1, 2)[rows, self._positions] = new.transpose(1, 2)
                shown.append(held[:, :, : self._num_keys])
        return shown[0], shown[1]


class CachedTarget:
    """A Hugging Face causal LM that reads on where its rows end."""

    def __init__(self, model: Any, target_layer_ids: Sequence[int] = ()) -> None:
        """`target_layer_ids` are the layers whose outputs are given as features."""
        self.model = model
        self._taps = target_layer_ids
        self._windows = {None, getattr(model.config, "sliding_window", None)}

    def new_cache(self, num_rows: int, max_tokens: int) -> RowCache:
        """An empty one."""
        return RowCache(self.model.config, num_rows, max_tokens, self.model.dtype, self.model.device)

    def begin(self, cache: RowCache, tokens_RT: Tensor) -> tuple[Tensor, Tensor | None]:
        """Texts from their start: what the head reads [R, T, D], and features [R, T, L*D] if layers are tapped.

        A row that is shorter is padded at its end; what stands there is worth nothing.
        """
        num_tokens = tokens_RT.shape[1]
        positions = torch.arange(num_tokens, device=tokens_RT.device)[None].expand(len(tokens_RT), -1)
        causal = {w: None if w is None or w >= num_tokens else _seen(positions[:1], num_tokens, w) for w in self._windows}
        cache.point_at(None, num_tokens)
        return self._run(cache, tokens_RT, positions, causal)

    def read(self, cache: RowCache, tokens_RT: Tensor, lengths_R: Tensor, num_keys: int) -> tuple[Tensor, Tensor | None]:
        """The next T tokens of every row, as `begin`; no row is then longer than `num_keys`, the keys that are looked at."""
        positions = lengths_R[:, None] + torch.arange(tokens_RT.shape[1], device=tokens_RT.device)
        cache.point_at(positions, num_keys)
        return self._run(cache, tokens_RT, positions, {w: _seen(positions, num_keys, w) for w in self._windows})

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def _run(
        self, cache: RowCache, tokens_RT: Tensor, positions_RT: Tensor, seen: Mapping[int | None, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        decoder = self.model.model
        hidden_RTD = decoder.embed_tokens(tokens_RT)
        masks = {window: _additive(what, hidden_RTD.dtype) for window, what in seen.items()}
        rotary = decoder.rotary_emb(hidden_RTD, positions_RT)
        outputs = {}
        with _attention(self.model.config):
            for k, layer in enumerate(decoder.layers):
                hidden_RTD = layer(
                    hidden_RTD,
                    attention_mask=masks,
                    position_ids=positions_RT,
                    past_key_values=cache,
                    use_cache=True,
                    position_embeddings=rotary,
                )
                if k in self._taps:
                    outputs[k] = hidden_RTD
        features = torch.cat([outputs[k] for k in self._taps], dim=-1) if self._taps else None
        return decoder.norm(hidden_RTD), features


class CachedDrafter:
    """A drafter for one text: the keys and values of its context are computed once."""

    def __init__(self, model: DraftModel, embedding_VE: Tensor, head_VE: Tensor, max_tokens: int) -> None:
        """Embedding and head are the target's; all lie on one device."""
        self.model = model
        self._embedding, self._head = embedding_VE, head_VE
        spec = model.spec
        shape = (spec.num_layers, 1, spec.num_key_value_heads, max_tokens, spec.head_dim)
        self._keys, self._values = (torch.zeros(shape, dtype=spec.dtype, device=head_VE.device) for _ in range(2))

    def read(self, features_1TL: Tensor, start: Tensor) -> None:
        """Take in the features of T tokens, the first of which is at position `start` ([1] int64)."""
        positions = start + torch.arange(features_1TL.shape[1], device=start.device)
        context, rotary = self.model.context(features_1TL), self.model.rotary(positions[None])
        for i, layer in enumerate(self.model.layers):
            keys, values = layer.self_attn.keys_values(context, rotary)
            self._keys[i].index_copy_(2, positions, keys)
            self._values[i].index_copy_(2, positions, values)

    def draft(self, anchor: Tensor, length: Tensor, num_keys: int) -> Tensor:
        """Logits [K-1, V] of the tokens after `anchor`, which follows the first `length` tokens; both are [1] int64.

        `num_keys`, not below `length`, of the context's slots are looked at.
        """
        spec = self.model.spec
        masked = torch.full((spec.block_size - 1,), spec.mask_token_id, device=length.device)
        hidden = F.embedding(torch.cat((anchor, masked))[None], self._embedding).to(spec.dtype)
        rotary = self.model.rotary((length + torch.arange(spec.block_size, device=length.device))[None])
        masks = {w: decoding_mask(length, num_keys, spec.block_size, w) for w in set(spec.layer_windows)}
        for layer, keys, values, window in zip(self.model.layers, self._keys, self._values, spec.layer_windows, strict=True):
            hidden = layer(hidden, (keys[:, :, :num_keys], values[:, :, :num_keys]), rotary, masks[window])
        return self.model.norm(hidden)[0, 1:].to(self._head.dtype) @ self._head.T


def _seen(positions_RT: Tensor, num_keys: int, window: int | None) -> Tensor:
    """[R, 1, T, num_keys] bool: causal; `window` counts the slots seen, the own included."""
    distance = positions_RT[:, None, :, None] - torch.arange(num_keys, device=positions_RT.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _additive(seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores: SDPA would make this of a bool mask in every layer."""
    return None if seen is None else torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)


@contextlib.contextmanager
def _attention(config: Any) -> Iterator[None]:
    before, config._attn_implementation = config._attn_implementation, _ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def _cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mapping[int | None, Tensor | None],
    scaling: float,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Hugging Face's attention call: [R, H, T, C] -> [R, T, H, C]; without a mask queries are causal in their own keys."""
    del module
    mask, shape, num_groups = attention_mask[sliding_window], query.shape, key.shape[1]
    if mask is None:
        grouped = num_groups != shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2), None
    heads = shape[1] // num_groups
    folded = query.reshape(shape[0], num_groups, heads * shape[2], shape[3])
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask.repeat(1, 1, heads, 1), scale=scaling)
    return out.reshape(shape).transpose(1, 2), None


transformers.AttentionInterface.register(_ATTENTION, _cached_attention)
