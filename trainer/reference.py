"""The same training as a plain loop: one thread, one model, eager modules, row after row. Slow, and easy to believe.

A module of its own because smoke runs and tests compare the pipeline with it. On CUDA only the kernel of flex_attention is
compiled, for eager flex_attention holds all scores.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.anchors import block_labels
from trainer.batch import Batch, FeatureBatch
from trainer.config import TrainConfig
from trainer.loss import drafter_loss
from trainer.model.attention import draft_mask
from trainer.model.draft import DraftModel, copy_draft, forward_blocks
from trainer.model.target import TargetModel
from trainer.optim import DraftOptimizer
from trainer.packing import batches
from trainer.pipeline import Loaded


def plain_losses(config: TrainConfig, loaded: Loaded, steps: int) -> list[float]:
    """Loss of each of the first `steps` steps; one step takes a batch of every drafter."""
    device = torch.device(config.pipeline.target_devices[0])
    target, num_batches = loaded.targets[str(device)], len(config.pipeline.drafter_devices)
    ends = target.ends(device, loaded.spec.dtype)
    model = copy_draft(loaded.initial, device)
    optimizer = DraftOptimizer(model, config)
    stream = batches(loaded.shards, config)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        rows = itertools.chain.from_iterable(map(rows_of, itertools.islice(stream, num_batches)))
        parts = [_accumulate(config, row.to(device), target, model, ends) for row in rows]
        loss_sum, weight_sum = (torch.stack(sums).sum() for sums in zip(*parts, strict=True))
        optimizer.step(step, loss_sum, weight_sum)
        losses.append((loss_sum / weight_sum).item())
    return losses


def rows_of(batch: Batch) -> Iterator[Batch]:
    """A batch as batches of one row."""
    for r in range(len(batch.tokens)):
        values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        yield Batch(**{name: v[r : r + 1] if isinstance(v, Tensor) else v for name, v in values.items()})


def _accumulate(
    config: TrainConfig, row: Batch, target: TargetModel, model: DraftModel, ends: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Add a row's gradient; returns its loss sum and weight sum."""
    embedding, head = ends
    size = config.draft.block_size
    features = FeatureBatch(batch=row, context_features=target.context_features(row, eager=True))
    labels, weights = block_labels(row, size, config.loss_gamma)
    hidden = forward_blocks(model, embedding, features, draft_mask(row, size))
    loss = drafter_loss(hidden, head, labels, weights, eager=True)
    loss.loss_sum.backward()
    return loss.loss_sum.detach(), loss.weight_sum
