"""One TargetForwardLoop's target model over static slots: staged in, one graph a slot, written where the drafter reads it.

A drafter on the same GPU is given its slot filled in place. For another GPU the target fills a slot of its own and a peer copy
follows on side streams of both GPUs, while the next batch is already being worked on. Belongs to one target thread.

torch runs a peer copy on the source's current stream and makes it wait for the destination's, so this thread sets streams of
its own on every GPU that it touches.
"""

import functools

import torch

from trainer.batch import Batch
from trainer.graphs import DeviceClock, Graphs
from trainer.model.target import TargetModel
from trainer.packing import add_noise
from trainer.slots import PinnedStage, Slot, make_slot
from trainer.wiring import STALL_S, Wiring, enter

_OWN_SLOTS = 2
"""One is written while the other is copied."""


class TargetForward:
    """The target's side of the slots."""

    def __init__(self, wiring: Wiring, rank: int, target: TargetModel) -> None:
        """Enter the thread's device; the drafters have made their slots."""
        config = self._config = wiring.config
        self.device = torch.device(config.pipeline.target_devices[rank])
        enter(self.device, wiring)
        self._target = target
        self._facts = wiring.facts[f"target-{rank}"]
        self._clock = self._facts.clock = DeviceClock(self.device)
        self._slots = {drafter: slots for (sender, drafter), slots in wiring.slots.items() if sender == rank}
        self._free = {drafter: channel for (sender, drafter), channel in wiring.free.items() if sender == rank}
        local = [slot for slots in self._slots.values() for slot in slots if self._is_local(slot)]
        shape = len(target.target_layer_ids), target.embedding.shape[1]
        remote = len(local) < sum(map(len, self._slots.values()))
        self._own = [make_slot(config, *shape, self.device) for _ in range(_OWN_SLOTS if remote else 0)]
        self._prepare([*local, *self._own])

    def _prepare(self, slots: list[Slot]) -> None:
        """Phase 1: compile, warm up, capture a graph for each slot that is written."""
        graphs = Graphs(self._config.pipeline.graphs, self.device, self._facts)
        graphs.warm_up(functools.partial(self._fill, slots[0]))
        self._run = {id(slot): graphs.ready(functools.partial(self._fill, slot)) for slot in slots}

    def connect(self) -> None:
        """Phase 2: page-locked memory, and side streams on the GPUs that are copied between."""
        self._stage = PinnedStage(self._config, self.device)
        if self._own:
            mine = torch.cuda.current_stream()
            others = {slot.features.context_features.device for slots in self._slots.values() for slot in slots}
            for other in others - {self.device}:
                torch.cuda.set_stream(torch.cuda.Stream(other))
            torch.cuda.set_stream(mine)
            self._copies = torch.cuda.Stream(self.device)

    def fill(self, batch: Batch, drafter: int) -> Slot:
        """Put `batch` and its features into the drafter's next free slot; the GPU may still be at it."""
        slot = self._free[drafter].receive(timeout_s=STALL_S)
        if self._is_local(slot):
            slot.free.wait()
            self._forward(slot, batch)
            slot.filled.record()
            return slot
        self._own.append(own := self._own.pop(0))
        own.free.wait()
        self._forward(own, batch)
        own.filled.record()
        with torch.cuda.stream(self._copies):
            own.filled.wait()
            slot.free.wait()
            slot.copy_from(own)
            own.free.record()
            slot.filled.record()
        return slot

    def reset(self) -> None:
        """Before the gate opens: what was measured does not count."""
        self._clock.reset()

    def _forward(self, slot: Slot, batch: Batch) -> None:
        self._clock.limit(len(self._own) or 2)
        self._stage.load(batch, slot.features.batch)
        with self._clock.span():
            self._run[id(slot)]()
            if self._config.draft.feature_noise and not batch.held_out:
                for row, features in enumerate(slot.features.context_features):
                    add_noise(features, self._config, batch.index, row)

    def _fill(self, slot: Slot) -> None:
        self._target.context_features(slot.features.batch, slot.features.context_features, slot.features.target_states)

    def _is_local(self, slot: Slot) -> bool:
        return slot.features.context_features.device == self._target.embedding.device
