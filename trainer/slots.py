"""Slots: static buffers that carry a batch and its context features from a target to a drafter.

Addresses never change, so CUDA graphs read and write them; nothing is allocated while a run is on. A slot belongs to one pair
(target, drafter), lies on the drafter's device and goes round: the target receives it free and fills it, the drafter trains on
it and sends it back. The host hands slots over before the GPU is done with them: `filled` and `free` order the streams.

A slot is in one thread's hands at a time. On the CPU the marks do nothing.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.batch import Batch, FeatureBatch
from trainer.config import TrainConfig
from trainer.packing import blank_batch


class Mark:
    """A point in a stream that other streams and the host can wait for; before the first `record` nobody waits."""

    def __init__(self, device: torch.device) -> None:
        """A mark for streams of `device`."""
        self._event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def record(self) -> None:
        """Here, in the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """The current stream, of whichever GPU, goes on from here once the mark is reached."""
        if self._event is not None:
            self._event.wait()

    def synchronize(self) -> None:
        """The host waits."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(frozen=True, slots=True)
class Slot:
    """One batch with its features, on one device."""

    features: FeatureBatch
    filled: Mark
    """Set by the target: everything is there."""
    free: Mark
    """Set by the drafter: everything has been read."""

    @property
    def tensors(self) -> list[Tensor]:
        """All buffers, in a fixed order."""
        states = self.features.target_states
        return [*tensors_of(self.features.batch), self.features.context_features, *([] if states is None else [states])]

    def copy_from(self, other: "Slot") -> None:
        """Copy from another device, in the current streams of both (torch's peer copy waits for either)."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)


def make_slot(config: TrainConfig, num_tapped: int, hidden_size: int, device: torch.device) -> Slot:
    """A slot with a blank batch and zero features, from `num_tapped` layers of this size."""
    batch = blank_batch(config).to(device)

    def zeros(width: int) -> Tensor:
        return torch.zeros(*batch.tokens.shape, width, dtype=getattr(torch, config.target.dtype), device=device)

    states = zeros(hidden_size) if config.optim.loss_labels == "logits" else None
    features = FeatureBatch(batch=batch, context_features=zeros(num_tapped * hidden_size), target_states=states)
    return Slot(features, Mark(device), Mark(device))


class PinnedStage:
    """Page-locked copies of the batches that are on their way to one GPU; on the CPU it copies straight."""

    _DEPTH = 2

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        """Allocate the copies, which may synchronise the device."""
        depth = self._DEPTH if device.type == "cuda" else 0
        self._ring = [(pinned(blank_batch(config)), Mark(device)) for _ in range(depth)]

    def load(self, batch: Batch, into: Batch) -> None:
        """Copy `batch` to the static `into` in the current stream; waits for the copy before the last."""
        if self._ring:
            self._ring.append(self._ring.pop(0))
            staged, copied = self._ring[-1]
            copied.synchronize()
            copy_batch(batch, staged)
            copy_batch(staged, into)
            copied.record()
        else:
            copy_batch(batch, into)


def tensors_of(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, in a fixed order."""
    return [value for f in dataclasses.fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)]


def copy_batch(source: Batch, into: Batch) -> None:
    """Copy the tensors; `index` stays."""
    for theirs, mine in zip(tensors_of(source), tensors_of(into), strict=True):
        mine.copy_(theirs, non_blocking=True)


def pinned(batch: Batch) -> Batch:
    """The same batch in page-locked memory."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return Batch(**{name: v.pin_memory() if isinstance(v, Tensor) else v for name, v in values.items()})
