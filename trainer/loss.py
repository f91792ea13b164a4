"""The weighted cross-entropy of a batch's blocks, without ever holding the logits of all of them.

Logits are [B*N*(K-1), V]: at Qwen3-8B's size 75 GB in fp32. The loss goes through them in chunks of tokens and makes
the gradient of the hidden states on the way, so that a chunk's logits live once and are not recomputed. The head is
frozen and gets no gradient. On CUDA a chunk's arithmetic is compiled: two passes over the logits instead of ten. Called by
drafter threads; no synchronisation. Shape legend: `trainer.batch`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_TOKENS = 4096
"""Tokens whose logits are in memory at once: 2.5 GB in fp32 for 151936 words."""


@dataclass(frozen=True, slots=True)
class LossParts:
    """Sums over a batch, not normalised: drafters add theirs up and divide by the weight of all of them."""

    loss_sum: Tensor
    """Weighted cross-entropy; fp32 (fp64 for fp64 hidden states), differentiable in the hidden states."""
    weight_sum: Tensor
    """Sum of the weights, fp32."""
    correct: Tensor
    """[B, N, K] bool: the likeliest token is the label; False for slot 0 and where the weight is 0."""


def drafter_loss(
    hidden_BNKE: Tensor,
    head_VE: Tensor,
    labels_BNK: Tensor,
    weights_BNK: Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    eager: bool = False,
) -> LossParts:
    """Sum of weight * cross-entropy over slots 1..K-1; labels and weights of slot 0 are not read.

    `head_VE` has the type of `hidden_BNKE`; `chunk_tokens` changes memory, not the result. On CPU, where shapes may vary, slots
    of weight 0 are left out; on CUDA chunks are compiled, unless they are to be `eager`.
    """
    hidden_TE = hidden_BNKE[:, :, 1:].flatten(0, 2)
    labels_T, weights_T = labels_BNK[:, :, 1:].flatten(), weights_BNK[:, :, 1:].flatten()
    counts_T = weights_T > 0
    kept = counts_T.nonzero()[:, 0] if hidden_TE.device.type == "cpu" else slice(None)
    cross_entropy = _compiled_cross_entropy() if hidden_TE.is_cuda and not eager else _cross_entropy
    loss_sum, predicted = _ChunkedCrossEntropy.apply(
        hidden_TE[kept], head_VE, labels_T[kept], weights_T[kept], chunk_tokens, cross_entropy
    )
    correct_T = torch.zeros_like(counts_T)
    correct_T[kept] = predicted == labels_T[kept]
    correct_BNJ = (correct_T & counts_T).view_as(labels_BNK[:, :, 1:])
    return LossParts(loss_sum, weights_T.sum(), torch.nn.functional.pad(correct_BNJ, (1, 0), value=False))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """(hidden [T, E], head [V, E], labels [T], weights [T], chunk, its function) -> (weighted sum, likeliest tokens [T])."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TE: Tensor,
        head_VE: Tensor,
        labels_T: Tensor,
        weights_T: Tensor,
        chunk: int,
        cross_entropy: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        wants_grad = ctx.needs_input_grad[0]
        grad_TE = torch.empty_like(hidden_TE) if wants_grad else None
        losses, predictions = [], []
        for start in range(0, max(1, len(hidden_TE)), chunk):  # no slot at all still makes a loss
            part = slice(start, start + chunk)
            loss, predicted, grad_logits = cross_entropy(hidden_TE[part], head_VE, labels_T[part], weights_T[part], wants_grad)
            losses.append(loss)
            predictions.append(predicted)
            if grad_TE is not None:
                torch.mm(grad_logits, head_VE, out=grad_TE[part])
        ctx.save_for_backward(grad_TE)
        predicted_T = torch.cat(predictions)
        ctx.mark_non_differentiable(predicted_T)
        return torch.stack(losses).sum(), predicted_T

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_predicted: None) -> tuple[Tensor | None, ...]:
        (grad_TE,) = ctx.saved_tensors
        return grad_TE * grad_loss, None, None, None, None, None


def _cross_entropy(
    hidden_TE: Tensor, head_VE: Tensor, labels_T: Tensor, weights_T: Tensor, wants_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted sum, likeliest tokens, gradient of the logits in the head's type, if wanted) of one chunk."""
    logits_TV = (hidden_TE @ head_VE.T).to(torch.promote_types(hidden_TE.dtype, torch.float32))
    predicted_T = logits_TV.argmax(dim=-1)
    log_total_T = logits_TV.logsumexp(dim=-1)
    label_logits_T = logits_TV.gather(-1, labels_T[:, None])[:, 0]
    loss = ((log_total_T - label_logits_T) * weights_T).sum()
    if not wants_grad:
        return loss, predicted_T, loss
    is_label_TV = labels_T[:, None] == torch.arange(logits_TV.shape[1], device=labels_T.device)
    grad_TV = ((logits_TV - log_total_T[:, None]).exp() - is_label_TV.to(logits_TV.dtype)) * weights_T[:, None]
    return loss, predicted_T, grad_TV.to(head_VE.dtype)


@functools.cache
def _compiled_cross_entropy() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_cross_entropy, dynamic=False, fullgraph=True)
