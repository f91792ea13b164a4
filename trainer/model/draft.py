"""The draft model: a few Qwen3-shaped layers that read the target's features and fill a whole block at once.

The context goes through `fc` and `hidden_norm` once; every layer projects that same context to keys and values beside
those of its block tokens. Embedding and output head are the target's, frozen, and are not part of the model. Parameter
names and shapes are those of z-lab's checkpoints.

Parameters are fp32 masters; each is cast to the compute type where it is used. That keeps one set of weights, fp32
gradients to sum and clip, and static addresses for CUDA graphs, and costs, by arithmetic, 1 % of a step at Qwen3-8B's size,
where a second bf16 set would have to be refreshed by the optimizer.

Used by one drafter thread each. Shape legend: `trainer.batch`; C is the width of a head, G counts key and value heads.
Source: DFlash (arXiv 2602.06036).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.anchors import block_input_ids, block_positions
from trainer.batch import Batch, FeatureBatch
from trainer.config import DraftConfig
from trainer.errors import ConfigError
from trainer.model.attention import AttentionMask, attend, draft_mask


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetInfo:
    """What a drafter has to know of its target model."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    max_position_embeddings: int
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSpec:
    """A draft model's shape: the configuration with every None taken from the target."""

    num_layers: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    initializer_range: float
    layer_windows: tuple[int | None, ...]
    """Of each layer: None attends to all, a number slides and is causal inside a block."""
    dtype: torch.dtype
    """Of the computation; parameters are fp32."""


def resolve_target_layer_ids(config: DraftConfig, num_target_layers: int) -> tuple[int, ...]:
    """The tapped layers, the default spread from layer 1 to L-3; raises ConfigError for a target without such layers.

    The target's last layer cannot be tapped: servers and Hugging Face give its output only after the final norm.
    """
    ids = config.target_layer_ids or _spread(config.num_layers, num_target_layers)
    if list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= num_target_layers - 2:
        hint = "" if config.target_layer_ids else f" (the default for draft.num_layers {config.num_layers})"
        raise ConfigError(
            f"draft.target_layer_ids must be different layers in 0..{num_target_layers - 2}, "
            f"for the target has {num_target_layers}, got {list(ids)}{hint}"
        )
    return tuple(ids)


def _spread(num_draft_layers: int, num_target_layers: int) -> list[int]:
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + i * step) for i in range(num_draft_layers)]


def resolve_draft(config: DraftConfig, info: TargetInfo, mask_token_id: int) -> DraftSpec:
    """The drafter's shape; raises ConfigError for heads that do not fit together."""
    heads = config.num_attention_heads or info.num_attention_heads
    kv_heads = config.num_key_value_heads or info.num_key_value_heads
    head_dim = config.head_dim or info.head_dim
    if heads % kv_heads:
        raise ConfigError(f"draft.num_attention_heads must be a multiple of the {kv_heads} key and value heads, got {heads}")
    if head_dim % 2:
        raise ConfigError(f"draft.head_dim must be even for rotary positions, got {head_dim}")
    return DraftSpec(
        num_layers=config.num_layers,
        block_size=config.block_size,
        target_layer_ids=resolve_target_layer_ids(config, info.num_layers),
        mask_token_id=mask_token_id,
        hidden_size=info.hidden_size,
        intermediate_size=config.intermediate_size or info.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=info.rms_norm_eps,
        rope_theta=info.rope_theta,
        initializer_range=info.initializer_range,
        layer_windows=layer_windows(config.layer_types or ["full_attention"] * config.num_layers, config.sliding_window),
        dtype=getattr(torch, config.dtype),
    )


KeysValues = tuple[Tensor, Tensor]
"""A layer's keys and values of some slots, [B, G, T, C] each, the keys rotated."""


def layer_windows(layer_types: Sequence[str], sliding_window: int | None) -> tuple[int | None, ...]:
    """The window of each layer of these types, as a checkpoint's configuration names them."""
    return tuple(sliding_window if kind == "sliding_attention" else None for kind in layer_types)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary factors of some slots, [B, 1, T, C] each."""

    cos: Tensor
    sin: Tensor


def rotary_factors(positions_BT: Tensor, head_dim: int, theta: float) -> Rotary:
    """Plain rotary positions in fp32, the two halves of a head paired (as in GPT-NeoX and Llama)."""
    exponents = torch.arange(0, head_dim, 2, device=positions_BT.device, dtype=torch.float32) / head_dim
    angles = positions_BT[:, None, :, None].float() * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return Rotary(angles.cos(), angles.sin())


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary factors [B, 1, T, C] to [B, heads, T, C]."""
    first, second = x.chunk(2, dim=-1)
    return x * rotary.cos + torch.cat((-second, first), dim=-1) * rotary.sin


class Linear(nn.Module):
    """A matrix without bias, in the compute type.

    What it reads is rounded here and not before: of what several matrices read, the gradients are then summed unrounded.
    """

    def __init__(self, num_in: int, num_out: int, dtype: torch.dtype) -> None:
        """Allocate without values."""
        super().__init__()
        self._dtype = dtype
        self.weight = nn.Parameter(torch.empty(num_out, num_in, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """[..., num_in] -> [..., num_out]."""
        return F.linear(x.to(self._dtype), self.weight.to(self._dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in fp32 or finer, and so is what it gives."""

    def __init__(self, width: int, eps: float) -> None:
        """Allocate without values."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)


class Attention(nn.Module):
    """Block tokens attend to the context and to their own block."""

    def __init__(self, spec: DraftSpec) -> None:
        """Allocate without values."""
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = Linear(spec.hidden_size, spec.num_attention_heads * spec.head_dim, spec.dtype)
        self.k_proj = Linear(spec.hidden_size, spec.num_key_value_heads * spec.head_dim, spec.dtype)
        self.v_proj = Linear(spec.hidden_size, spec.num_key_value_heads * spec.head_dim, spec.dtype)
        self.o_proj = Linear(spec.num_attention_heads * spec.head_dim, spec.hidden_size, spec.dtype)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def keys_values(self, x_BTE: Tensor, rotary: Rotary) -> KeysValues:
        """[B, T, E] at the positions of `rotary` -> its keys and values, [B, G, T, C] each."""
        key_BGTC = rotate(self.k_norm(self._heads(self.k_proj(x_BTE))).transpose(1, 2), rotary)
        values_BGTC = self._heads(self.v_proj(x_BTE)).transpose(1, 2)
        return key_BGTC.to(values_BGTC.dtype), values_BGTC

    def forward(self, x_BQE: Tensor, context: KeysValues, rotary: Rotary, mask: AttentionMask | None) -> Tensor:
        """Block tokens [B, Q, E] and the context's keys and values -> [B, Q, E]. Without a mask everything is seen."""
        query_BHQC = rotate(self.q_norm(self._heads(self.q_proj(x_BQE))).transpose(1, 2), rotary)
        keys, values = (torch.cat(both, dim=2) for both in zip(context, self.keys_values(x_BQE, rotary), strict=True))
        out_BHQC = attend(query_BHQC.to(keys.dtype), keys, values, mask, self.head_dim**-0.5)
        return self.o_proj(out_BHQC.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DraftSpec) -> None:
        """Allocate without values."""
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size, spec.dtype)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, spec.dtype)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, spec.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer; the context is not normed here, for `hidden_norm` did it once for all layers."""

    def __init__(self, spec: DraftSpec) -> None:
        """Allocate without values."""
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, x_BQE: Tensor, context: KeysValues, rotary: Rotary, mask: AttentionMask | None) -> Tensor:
        """Block tokens [B, Q, E] and the context's keys and values in this layer -> [B, Q, E]."""
        x_BQE = x_BQE + self.self_attn(self.input_layernorm(x_BQE), context, rotary, mask)
        return x_BQE + self.mlp(self.post_attention_layernorm(x_BQE))


class DraftModel(nn.Module):
    """The trainable part of a drafter; build it with `build_draft`."""

    def __init__(self, spec: DraftSpec) -> None:
        """Allocate parameters without values."""
        super().__init__()
        self.spec = spec
        self.fc = Linear(len(spec.target_layer_ids) * spec.hidden_size, spec.hidden_size, spec.dtype)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self,
        context_features: Tensor,
        context_positions: Tensor,
        block_embeds: Tensor,
        block_positions: Tensor,
        masks: Mapping[int | None, AttentionMask | None],
    ) -> Tensor:
        """Hidden states of the block slots after the final norm: [B, Q, E] in the compute type.

        `context_features` [B, S, L*D], `context_positions` [B, S], `block_embeds` [B, Q, E], `block_positions` [B, Q]; a mask
        for each window that a layer has.
        """
        context_BSE = self.context(context_features)
        context_rotary, rotary = self.rotary(context_positions), self.rotary(block_positions)
        x_BQE = block_embeds.to(self.spec.dtype)
        for layer, window in zip(self.layers, self.spec.layer_windows, strict=True):
            x_BQE = layer(x_BQE, layer.self_attn.keys_values(context_BSE, context_rotary), rotary, masks[window])
        normed: Tensor = self.norm(x_BQE)
        return normed.to(self.spec.dtype)

    def context(self, context_features: Tensor) -> Tensor:
        """Features [B, S, L*D] as every layer reads them: [B, S, E] in fp32 or finer."""
        normed: Tensor = self.hidden_norm(self.fc(context_features))
        return normed

    def rotary(self, positions_BT: Tensor) -> Rotary:
        """Rotary factors of slots at these positions."""
        return rotary_factors(positions_BT, self.spec.head_dim, self.spec.rope_theta)


def build_draft(spec: DraftSpec, seed: int, device: torch.device) -> DraftModel:
    """A fresh drafter: matrices from N(0, initializer_range), norms 1, equal for equal seeds on every device."""
    model = DraftModel(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, spec.initializer_range, generator=generator)
    return model.to(device)


def copy_draft(model: DraftModel, device: torch.device) -> DraftModel:
    """A drafter of its own on `device` with equal parameters."""
    return copy.deepcopy(model).to(device)


def draft_masks(batch: Batch, spec: DraftSpec) -> dict[int | None, AttentionMask]:
    """What the layers of a drafter see of a batch, by window."""
    return {window: draft_mask(batch, spec.block_size, window) for window in dict.fromkeys(spec.layer_windows)}


def forward_blocks(
    model: nn.Module, embedding_VE: Tensor, features: FeatureBatch, masks: Mapping[int | None, AttentionMask]
) -> Tensor:
    """Hidden states of all blocks of a batch at once, [B, N, K, E]; `masks` are `draft_masks` of the same batch.

    `model` is a DraftModel or its compilation.
    """
    spec: DraftSpec = model.spec
    batch, block_size = features.batch, spec.block_size
    input_ids_BNK = block_input_ids(batch, block_size, spec.mask_token_id)
    embeds_BQE = F.embedding(input_ids_BNK.flatten(1), embedding_VE)
    positions_BQ = block_positions(batch, block_size).flatten(1)
    hidden_BQE = model(features.context_features, batch.positions, embeds_BQE, positions_BQ, masks)
    return hidden_BQE.unflatten(1, (-1, block_size))
