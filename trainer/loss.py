"""The weighted cross-entropy of a batch's blocks, without ever holding the logits of all of them.

Logits are [B*N*(K-1), V]: at Qwen3-8B's size 75 GB in fp32. The loss goes through them in chunks of tokens and makes
the gradient of the hidden states on the way, so that a chunk's logits live once and are not recomputed. The head is
frozen and gets no gradient. On CUDA a chunk's arithmetic is compiled: two passes over the logits instead of ten. Called by
drafter threads; no synchronisation. Shape legend: `trainer.batch`; T counts slots of a chunk, J = K-1 drafted slots of a block.

Sources: decaying weights: DFlash (arXiv 2602.06036); weights by confidence: D-PACE (arXiv 2605.18810).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.anchors import block_labels, block_slots
from trainer.batch import FeatureBatch
from trainer.config import TrainConfig
from trainer.model.draft import DraftSpec, draft_masks, forward_blocks

CHUNK_TOKENS = 4096
"""Tokens whose logits are in memory at once: 2.5 GB in fp32 for 151936 words."""
DPACE_FLOOR = 0.5
"""D-PACE's alpha: what the drafter's confidence counts at least."""


@dataclass(frozen=True, slots=True)
class LossParts:
    """Sums over a batch, not normalised: drafters add theirs up and divide by the weight of all of them."""

    loss_sum: Tensor
    """Weighted cross-entropy; fp32 (fp64 for fp64 hidden states), differentiable in the hidden states."""
    weight_sum: Tensor
    """Sum of the weights that counted, fp32."""
    correct: Tensor
    """[B, N, K] bool: the likeliest token is the label; False for slot 0 and where the weight is 0."""


def blocks_loss(
    config: TrainConfig, model: nn.Module, ends: tuple[Tensor, Tensor], features: FeatureBatch, *, eager: bool = False
) -> tuple[LossParts, Tensor]:
    """The loss of a batch's blocks as `config` says, and their weights [B, N, K], which are those by slot for D-PACE, too.

    `model` is a DraftModel or its compilation, `ends` are the target's embedding and head.
    """
    spec: DraftSpec = model.spec
    embedding, head = ends
    labels, weights = block_labels(features.batch, spec.block_size, config.loss_gamma)
    hidden = forward_blocks(model, embedding, features, draft_masks(features.batch, spec))
    teacher = None
    if config.optim.loss_labels == "logits":
        before = (block_slots(features.batch, spec.block_size) - 1).clamp(0, features.batch.tokens.shape[1] - 1)
        rows = torch.arange(len(before), device=before.device)[:, None, None]
        teacher = features.target_states[rows, before].to(head.dtype)
    by_confidence = config.optim.loss_weights == "dpace"
    return drafter_loss(hidden, head, labels, weights, teacher=teacher, by_confidence=by_confidence, eager=eager), weights


def drafter_loss(
    hidden_BNKE: Tensor,
    head_VE: Tensor,
    labels_BNK: Tensor,
    weights_BNK: Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    teacher: Tensor | None = None,
    by_confidence: bool = False,
    eager: bool = False,
) -> LossParts:
    """Sum of weight * cross-entropy over slots 1..K-1; labels and weights of slot 0 are not read.

    `head_VE` has the type of `hidden_BNKE`; `chunk_tokens` changes memory, not the result. With a `teacher` [B, N, K, E], the
    target's final hidden states where it predicts these slots, the cross-entropy is with its distribution. Weights that are not
    0 become D-PACE's if they go `by_confidence`. On CPU, where shapes may vary, slots of weight 0 are left out; on CUDA chunks
    are compiled, unless they are to be `eager`.
    """
    num_drafted = hidden_BNKE.shape[2] - 1
    hidden_TE = hidden_BNKE[:, :, 1:].flatten(0, 2)
    labels_T, weights_T = labels_BNK[:, :, 1:].flatten(), weights_BNK[:, :, 1:].flatten()
    counts_T = weights_T > 0
    kept: Tensor | slice = slice(None)
    if by_confidence:
        chunk_tokens = max(1, chunk_tokens // num_drafted) * num_drafted  # whole blocks
    elif hidden_TE.device.type == "cpu":
        kept = counts_T.nonzero()[:, 0]
    compute = _compiled_chunk() if hidden_TE.is_cuda and not eager else _chunk
    loss_sum, weight_sum, predicted = _ChunkedCrossEntropy.apply(
        hidden_TE[kept],
        head_VE,
        labels_T[kept],
        weights_T[kept],
        None if teacher is None else teacher[:, :, 1:].flatten(0, 2)[kept],
        chunk_tokens,
        functools.partial(compute, confidence_slots=num_drafted if by_confidence else 0),
    )
    correct_T = torch.zeros_like(counts_T)
    correct_T[kept] = predicted == labels_T[kept]
    correct_BNJ = (correct_T & counts_T).view_as(labels_BNK[:, :, 1:])
    return LossParts(loss_sum, weight_sum, torch.nn.functional.pad(correct_BNJ, (1, 0), value=False))


def confidence_weights(losses_T: Tensor, counts_T: Tensor, num_drafted: int) -> Tensor:
    """D-PACE's weights [T] of whole blocks' slots: what a slot adds to the expected acceptance of its block.

    With the confidence q = (1 - alpha) * exp(-loss) + alpha of each slot, slot j weighs the sum over the slots m >= j of the
    product of q over the slots up to m. Slots that do not count weigh 0 and hinder nobody.
    """
    counts_NJ = counts_T.view(-1, num_drafted)
    confidence_NJ = (1 - DPACE_FLOOR) * torch.exp(-losses_T.view(-1, num_drafted)) + DPACE_FLOOR
    reached_NJ = torch.where(counts_NJ, confidence_NJ, 1.0).cumprod(dim=1) * counts_NJ
    return (reached_NJ.flip(1).cumsum(dim=1).flip(1) * counts_NJ).flatten()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted sum, sum of weights, likeliest tokens [T]; `teacher` is [T, E], `compute` does one chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TE: Tensor,
        head_VE: Tensor,
        labels_T: Tensor,
        weights_T: Tensor,
        teacher_TE: Tensor | None,
        chunk: int,
        compute: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        wants_grad = ctx.needs_input_grad[0]
        grad_TE = torch.empty_like(hidden_TE) if wants_grad else None
        losses, weights, predictions = [], [], []
        for start in range(0, max(1, len(hidden_TE)), chunk):  # no slot at all still makes a loss
            part = slice(start, start + chunk)
            teacher = None if teacher_TE is None else teacher_TE[part]
            loss, weight, predicted, grad_logits = compute(
                hidden_TE[part], head_VE, labels_T[part], weights_T[part], teacher, wants_grad
            )
            losses.append(loss)
            weights.append(weight)
            predictions.append(predicted)
            if grad_TE is not None:
                torch.mm(grad_logits, head_VE, out=grad_TE[part])
        ctx.save_for_backward(grad_TE)
        predicted_T, weight_sum = torch.cat(predictions), torch.stack(weights).sum()
        ctx.mark_non_differentiable(predicted_T, weight_sum)
        return torch.stack(losses).sum(), weight_sum, predicted_T

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        (grad_TE,) = ctx.saved_tensors
        return grad_TE * grad_loss, None, None, None, None, None, None


def _chunk(
    hidden_TE: Tensor,
    head_VE: Tensor,
    labels_T: Tensor,
    weights_T: Tensor,
    teacher_TE: Tensor | None,
    wants_grad: bool,
    *,
    confidence_slots: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(weighted sum, sum of weights, likeliest tokens, gradient of the logits in the head's type, if wanted) of one chunk."""
    precise = torch.promote_types(hidden_TE.dtype, torch.float32)
    logits_TV = (hidden_TE @ head_VE.T).to(precise)
    predicted_T = logits_TV.argmax(dim=-1)
    log_total_T = logits_TV.logsumexp(dim=-1)
    if teacher_TE is None:
        label_logits_T = logits_TV.gather(-1, labels_T[:, None])[:, 0]
        wanted_TV = (labels_T[:, None] == torch.arange(logits_TV.shape[1], device=labels_T.device)).to(precise)
    else:
        wanted_TV = torch.softmax((teacher_TE @ head_VE.T).to(precise), dim=-1)
        label_logits_T = (wanted_TV * logits_TV).sum(dim=-1)
    losses_T = log_total_T - label_logits_T
    if confidence_slots:
        weights_T = confidence_weights(losses_T, weights_T > 0, confidence_slots).to(weights_T.dtype)
    loss, weight = (losses_T * weights_T).sum(), weights_T.sum()
    if not wants_grad:
        return loss, weight, predicted_T, loss
    grad_TV = ((logits_TV - log_total_T[:, None]).exp() - wanted_TV) * weights_T[:, None]
    return loss, weight, predicted_T, grad_TV.to(head_VE.dtype)


@functools.cache
def _compiled_chunk() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    return torch.compile(_chunk, dynamic=False, fullgraph=True)
