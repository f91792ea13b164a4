"""The same training as a plain loop: one thread, one model, eager modules, row after row. Slow, and easy to believe.

A module of its own because smoke runs and tests compare the pipeline with it. On CUDA only the kernel of flex_attention is
compiled, for eager flex_attention holds all scores.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.batch import Batch, FeatureBatch
from trainer.config import TrainConfig
from trainer.loss import blocks_loss
from trainer.model.draft import DraftModel, copy_draft
from trainer.model.target import TargetModel
from trainer.optim import DraftOptimizer
from trainer.packing import add_noise, batches
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
        parts = [_accumulate(config, row.to(device), number, target, model, ends) for number, row in rows]
        loss_sum, weight_sum = (torch.stack(sums).sum() for sums in zip(*parts, strict=True))
        optimizer.step(step, loss_sum, weight_sum)
        losses.append((loss_sum / weight_sum).item())
    return losses


def rows_of(batch: Batch) -> Iterator[tuple[int, Batch]]:
    """A batch as batches of one row, with their numbers in it."""
    for r in range(len(batch.tokens)):
        values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        yield r, Batch(**{name: v[r : r + 1] if isinstance(v, Tensor) else v for name, v in values.items()})


def _accumulate(
    config: TrainConfig, row: Batch, number: int, target: TargetModel, model: DraftModel, ends: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Add a row's gradient; returns its loss sum and weight sum."""
    wants_states = config.optim.loss_labels == "logits"
    states = target.embedding.new_empty(*row.tokens.shape, target.embedding.shape[1]) if wants_states else None
    context_features = target.context_features(row, states=states, eager=True)
    if config.draft.feature_noise:
        add_noise(context_features[0], config, row.index, number)
    features = FeatureBatch(batch=row, context_features=context_features, target_states=states)
    loss, _ = blocks_loss(config, model, ends, features, eager=True)
    loss.loss_sum.backward()
    return loss.loss_sum.detach(), loss.weight_sum
