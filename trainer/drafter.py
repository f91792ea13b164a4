"""One DrafterTrainLoop's drafter: model, optimizer and metrics over static slots, and the graphs of its step.

A lone drafter's step is one graph: forward, backward, clip, AdamW. With several, gradients are summed between a graph of
forward and backward and one of clip and AdamW. Each slot has graphs of its own that read it in place: of the plain step, of the
step before a log line, which also measures accuracy, and, where held-out batches arrive, of the forward alone. They are
variants over the same buffers and share one memory pool. Belongs to one thread.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.batch import NO_DOCUMENT
from trainer.checkpoint import Staging, TrainingState, save_checkpoint
from trainer.graphs import DeviceClock, Graphs, compiled
from trainer.loss import LossParts, blocks_loss
from trainer.metrics import StepMetrics
from trainer.model.draft import DraftModel, TargetInfo, copy_draft
from trainer.optim import DraftOptimizer, learning_rate
from trainer.slots import Slot, make_slot
from trainer.wiring import STALL_S, StepReport, Validated, Wiring, enter

_STEPS_IN_FLIGHT = 2
_VARIANTS = (False, True)
"""Of a step: plain, measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftParts:
    """What a drafter is built from; embedding and head are shared by the drafters of a device."""

    initial: DraftModel
    """In host memory; every drafter starts as its copy."""
    resumed: TrainingState | None
    """What it goes on from instead, if anything."""
    trained_with: Mapping[str, Any]
    """What whoever goes on from this run has to share with it."""
    info: TargetInfo
    embedding: Tensor
    head: Tensor
    checkpoints: Path | None
    """None: none are written."""


class Drafter:
    """One of the run's drafters, in its thread."""

    def __init__(self, wiring: Wiring, rank: int, parts: DraftParts) -> None:
        """Phase 1: build, compile, warm up and capture, in the thread that is going to train."""
        config = self._config = wiring.config
        self._wiring, self._rank, self._parts, self._spec = wiring, rank, parts, parts.initial.spec
        self._device = torch.device(config.pipeline.drafter_devices[rank])
        self._alone = len(config.pipeline.drafter_devices) == 1
        enter(self._device, wiring)
        self.model: DraftModel = copy_draft(parts.initial, self._device)
        self._forward = compiled(self.model, config.pipeline.graphs, self._device)
        self._optimizer = DraftOptimizer(self.model, config)
        self._metrics = StepMetrics(self._spec.block_size, self._device)
        self._held_out = StepMetrics(self._spec.block_size, self._device)
        self._context_tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        self._sums = torch.zeros(2, device=self._device)
        self._grad_norm = torch.zeros((), device=self._device)
        self._facts = wiring.facts[f"draft-{rank}"]
        self._clock = self._facts.clock = DeviceClock(self._device, spans_per_step=1 if self._alone else 2)
        self._prepare(self._make_slots())

    def _make_slots(self) -> list[Slot]:
        """As many for each target as `channel_capacity` says, all of them free."""
        config, wiring = self._config, self._wiring
        shape = len(self._spec.target_layer_ids), self._spec.hidden_size
        made = []
        for pair, free in wiring.free.items():
            if pair[1] == self._rank:
                slots = [make_slot(config, *shape, self._device) for _ in range(config.pipeline.channel_capacity)]
                wiring.slots[pair] = slots
                for slot in slots:
                    free.send(slot, timeout_s=STALL_S)
                made += slots
        return made

    def _prepare(self, slots: list[Slot]) -> None:
        graphs = Graphs(self._config.pipeline.graphs, self._device, self._facts)
        self._optimizer.hold(True)
        self._optimizer.begin(0)
        if self._config.pipeline.graphs != "lazy":  # unsound: what it leaves out here happens when everyone runs
            for measured in _VARIANTS:
                graphs.warm_up(functools.partial(self._whole_step, slots[0], measured))
        if graphs.captures:
            self._optimizer.capturable()
        body = self._whole_step if self._alone else self._backward
        variants = [(slot, measured) for slot in slots for measured in _VARIANTS]
        self._run = {(id(slot), measured): graphs.ready(functools.partial(body, slot, measured)) for slot, measured in variants}
        self._run_apply = graphs.ready(self._apply) if not self._alone else self._apply
        self._run_look = self._prepare_looks(graphs)
        self._static = [*self.model.parameters(), self._optimizer.flat_grad, self._sums]
        self._static += [tensor for slot in slots for tensor in slot.tensors]
        self._addresses = [tensor.data_ptr() for tensor in self._static]

    def _prepare_looks(self, graphs: Graphs) -> dict[int, Callable[[], None]]:
        """The forward alone, for the slots that held-out batches come in."""
        if self._rank != 0 or self._config.run.validate_every is None:
            return {}
        slots = self._wiring.slots[0, 0]
        graphs.warm_up(functools.partial(self._look, slots[0]))
        return {id(slot): graphs.ready(functools.partial(self._look, slot)) for slot in slots}

    def moved_to_this_thread(self) -> "Drafter":
        """Itself, on a stream of the calling thread."""
        enter(self._device, self._wiring)
        return self

    def connect(self) -> None:
        """Phase 2: the group with other GPUs, the memory of checkpoints, and a dry batch from every target."""
        self._wiring.drafter_sum.connect(self._rank)
        self._staging = Staging(self.model) if self._rank == 0 else None
        for step in range(self._wiring.dry_batches // len(self._config.pipeline.drafter_devices)):
            self.train(step)
        for look in self._run_look.values():
            look()
        self._held_out.read()
        self.report(0)
        self.check_equal()
        self._clock.reset()
        if self._parts.resumed is not None:
            self._optimizer.load_state_tensors(self._parts.resumed.tensors)
        self._optimizer.hold(False)

    def train(self, step: int) -> None:
        """0-based `step` of all drafters together; at most two are under way on the device."""
        pipeline, rank = self._config.pipeline, self._rank
        sender = (step * len(pipeline.drafter_devices) + rank) % len(pipeline.target_devices)
        self._clock.limit((_STEPS_IN_FLIGHT - 1) * self._clock.spans_per_step)
        self._optimizer.begin(step)
        with self._next_slot(sender) as slot, self._clock.span():
            self._run[id(slot), self._config.logs_after(step + 1)]()
        if not self._alone:
            self._wiring.drafter_sum.sum(rank, self._optimizer.flat_grad, self._sums)
            with self._clock.span():
                self._run_apply()
        if self._device.type == "cpu":
            self._check_finite()

    def look(self) -> None:
        """Look at the next of the held-out batches, which target 0 sends after the batches of the last step."""
        with self._next_slot(0) as slot:
            self._run_look[id(slot)]()

    def validated(self, done: int) -> Validated:
        """What the looks since the last call have seen; waits for the device."""
        return Validated(done, self._held_out.read())

    @contextlib.contextmanager
    def _next_slot(self, sender: int) -> Iterator[Slot]:
        """The next slot that target `sender` has filled, for the current stream; afterwards it is the target's again."""
        pair = (sender, self._rank)
        slot = self._wiring.features[pair].receive(timeout_s=STALL_S)
        slot.filled.wait()
        yield slot
        slot.free.record()
        self._wiring.free[pair].send(slot, timeout_s=STALL_S)

    def report(self, done: int) -> StepReport:
        """What happened since the last report; waits for the device."""
        self._check_finite()
        self._clock.limit(0)
        self._facts.addresses_unchanged = self._addresses == [tensor.data_ptr() for tensor in self._static]
        context_tokens = int(self._context_tokens.item())
        self._context_tokens.zero_()
        lr = learning_rate(self._config, max(0, done - 1))
        return StepReport(self._rank, done, self._metrics.read(), context_tokens, lr, self._grad_norm.item())

    def check_equal(self) -> None:
        """Refuse parameters that a step was not applied to, or whose bits are not the others'; waits for the device."""
        self._check_finite()
        sums = [parameter.detach().view(torch.int32).sum() for parameter in self.model.parameters()]
        self._wiring.drafter_sum.check_equal(self._rank, torch.stack(sums))

    def save(self, done: int) -> Path | None:
        """Write a checkpoint, if the run has a place for it; only the first drafter can. From the last one nobody goes on."""
        assert self._staging is not None
        parts, run, state = self._parts, self._config.run, None
        if parts.checkpoints is None:
            return None
        if done < run.steps:
            state = TrainingState(step=done, tensors=self._optimizer.state_tensors(), trained_with=parts.trained_with)
        return save_checkpoint(parts.checkpoints, done, self._staging, parts.info, state, run.keep_checkpoints)

    def _whole_step(self, slot: Slot, measured: bool) -> None:
        self._backward(slot, measured)
        self._apply()

    def _backward(self, slot: Slot, measured: bool) -> None:
        """Forward and backward into the flat gradient; loss and weight into `_sums`."""
        batch = slot.features.batch
        loss, weights = self._loss(slot)
        self._optimizer.zero_grad()
        loss.loss_sum.backward()
        self._metrics.add(loss, weights)
        if measured:
            self._metrics.measure(loss, weights, batch.anchor_valid)
        self._context_tokens += (batch.doc_ids != NO_DOCUMENT).sum()
        self._sums.copy_(torch.stack([loss.loss_sum.detach(), loss.weight_sum]))

    @torch.no_grad()
    def _look(self, slot: Slot) -> None:
        loss, weights = self._loss(slot)
        self._held_out.add(loss, weights)
        self._held_out.measure(loss, weights, slot.features.batch.anchor_valid)

    def _loss(self, slot: Slot) -> tuple[LossParts, Tensor]:
        """The loss of the slot's blocks, and their weights [B, N, K]."""
        return blocks_loss(self._config, self._forward, (self._parts.embedding, self._parts.head), slot.features)

    def _apply(self) -> None:
        self._grad_norm.copy_(self._optimizer.apply(self._sums[0], self._sums[1]))

    def _check_finite(self) -> None:
        self._optimizer.check(len(self._config.pipeline.drafter_devices))
