"""The three stages, one function each, and what their threads tell the supervisor.

    BatchPrefetcher --batches[t]--> TargetForwardLoop t --features[t, d]--> DrafterTrainLoop d

Batch i goes through target `i % T` to drafter `i % M`, which trains on it in step `i // M`; each channel has one sender and one
receiver, so batches arrive in order whichever target is faster, and what is on its way is bounded. A worker that fails says
`Died` and leaves; waking the others is the supervisor's business.

Each function runs in a thread of its own: `prefetch-0`, `target-<t>`, `draft-<d>`.
"""

import dataclasses
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.anchors import block_labels
from trainer.averaging import DrafterSum
from trainer.batch import NO_DOCUMENT, Batch, FeatureBatch
from trainer.channel import Channel, EndOfChannel
from trainer.checkpoint import save_checkpoint
from trainer.config import TrainConfig
from trainer.gate import StartupGate
from trainer.loss import LossParts, drafter_loss
from trainer.metrics import StepMetrics, Totals
from trainer.model.attention import draft_mask
from trainer.model.draft import DraftModel, DraftSpec, TargetInfo, build_draft, forward_blocks
from trainer.model.target import TargetModel
from trainer.optim import DraftOptimizer, learning_rate
from trainer.packing import blank_batch

STALL_S = 1800.0
"""No wait between workers lasts longer; a stage that hangs ends the run by then."""


@dataclass(frozen=True, slots=True)
class GateOpened:
    """Every worker is ready."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one drafter saw since its last report; `step` counts finished steps."""

    drafter: int
    step: int
    totals: Totals
    context_tokens: int
    lr: float
    grad_norm: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint lies on disk."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker has done all its work."""

    worker: str


@dataclass(frozen=True, slots=True)
class Died:
    """A worker has failed, in the step that it gives if it knows one."""

    worker: str
    step: int | None
    error: BaseException


Message = GateOpened | StepReport | Saved | Ended | Died
Mailbox = queue.SimpleQueue[Message | BaseException]
"""What the supervisor reads. A bare exception comes from a signal handler: stop, with this as the cause."""


@dataclass(slots=True)
class Worker:
    """A thread's name, its line to the supervisor and how far it is."""

    name: str
    mailbox: Mailbox
    step: int | None = None
    """The step that its current batch belongs to, counted from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """What the workers of one run share."""

    config: TrainConfig
    gate: StartupGate
    batches: list[Channel[Batch]]
    """By target."""
    features: dict[tuple[int, int], Channel[FeatureBatch]]
    """By target and drafter; only the pairs that meet."""
    drafter_sum: DrafterSum
    cpu_threads: int
    """What each CPU worker computes with."""

    def abort(self, cause: BaseException) -> None:
        """Wake every worker that waits, and stop every one that will."""
        self.gate.abort(cause)
        self.drafter_sum.abort()
        for channel in self.channels:
            channel.abort(cause)

    @property
    def channels(self) -> list[Channel[Batch] | Channel[FeatureBatch]]:
        """All of them."""
        return [*self.batches, *self.features.values()]


def run_worker(worker: Worker, body: Callable[[Worker], None]) -> None:
    """A worker thread's outermost frame: does `body`, then tells how it ended."""
    try:
        body(worker)
    except BaseException as error:  # noqa: BLE001 (the supervisor decides)
        worker.mailbox.put(Died(worker.name, worker.step, error))
    else:
        worker.mailbox.put(Ended(worker.name))


def batch_prefetcher(worker: Worker, wiring: Wiring, source: Iterator[Batch]) -> None:
    """BatchPrefetcher: deal the run's batches out to the targets, in turn."""
    config, outs = wiring.config, wiring.batches
    num_drafters = len(config.pipeline.drafter_devices)
    wiring.gate.pass_through(worker.name, timeout_s=STALL_S)
    for index in range(config.run.steps * num_drafters):
        worker.step = index // num_drafters + 1
        outs[index % len(outs)].send(next(source), timeout_s=STALL_S)
    for out in outs:
        out.close()


def target_forward_loop(worker: Worker, wiring: Wiring, rank: int, target: TargetModel) -> None:
    """TargetForwardLoop: give each batch its context features, and pass it on to the drafter that it is for."""
    config = wiring.config
    device = torch.device(config.pipeline.target_devices[rank])
    num_drafters = len(config.pipeline.drafter_devices)
    outs = {drafter: channel for (sender, drafter), channel in wiring.features.items() if sender == rank}
    with wiring.gate.turn(worker.name, timeout_s=STALL_S):
        _enter(device, wiring)
        target.context_features(blank_batch(config).to(device))
    wiring.gate.pass_through(worker.name, timeout_s=STALL_S)
    while (batch := _next_batch(wiring.batches[rank])) is not None:
        worker.step = batch.index // num_drafters + 1
        batch = batch.to(device)
        features = FeatureBatch(batch=batch, context_features=target.context_features(batch))
        if device.type == "cuda":  # the drafter reads on a stream of its own
            torch.cuda.current_stream().synchronize()
        outs[batch.index % num_drafters].send(features, timeout_s=STALL_S)
    for out in outs.values():
        out.close()


def _next_batch(inbox: Channel[Batch]) -> Batch | None:
    try:
        return inbox.receive(timeout_s=STALL_S)
    except EndOfChannel:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftParts:
    """What a drafter is built from; embedding and head are shared by the drafters of a device."""

    spec: DraftSpec
    info: TargetInfo
    embedding: Tensor
    head: Tensor
    checkpoints: Path


def drafter_train_loop(worker: Worker, wiring: Wiring, rank: int, parts: DraftParts) -> None:
    """DrafterTrainLoop: train one drafter, in step with the others; the first one writes the checkpoints."""
    config = wiring.config
    num_targets, num_drafters = len(config.pipeline.target_devices), len(config.pipeline.drafter_devices)
    with wiring.gate.turn(worker.name, timeout_s=STALL_S):
        drafter = _Drafter(wiring, rank, parts)
        drafter.dry_run()
    wiring.gate.pass_through(worker.name, timeout_s=STALL_S)
    for step in range(config.run.steps):
        worker.step = done = step + 1
        inbox = wiring.features[(step * num_drafters + rank) % num_targets, rank]
        drafter.train(step, inbox.receive(timeout_s=STALL_S))
        last = done == config.run.steps
        if last or done % config.run.log_every == 0:
            worker.mailbox.put(drafter.report(done))
        if last or done % config.run.checkpoint_every == 0:
            drafter.check_equal()
            if rank == 0:
                worker.mailbox.put(Saved(done, save_checkpoint(parts.checkpoints, done, drafter.model, parts.info)))


class _Drafter:
    """One drafter's model, optimizer and metrics, in its thread."""

    def __init__(self, wiring: Wiring, rank: int, parts: DraftParts) -> None:
        self._config, self._sum, self._rank, self._parts = wiring.config, wiring.drafter_sum, rank, parts
        self._device = torch.device(self._config.pipeline.drafter_devices[rank])
        _enter(self._device, wiring)
        self.model: DraftModel = build_draft(parts.spec, self._config.run.seed, self._device)
        self._optimizer = DraftOptimizer(self.model, self._config)
        self._metrics = StepMetrics(parts.spec.block_size, self._device)
        self._context_tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        self._grad_norm = torch.zeros((), device=self._device)

    def dry_run(self) -> None:
        """One forward and backward of the run's shape, so that what cannot work fails before the gate."""
        blank = blank_batch(self._config)
        width = len(self._parts.spec.target_layer_ids) * self._parts.spec.hidden_size
        dtype = getattr(torch, self._config.target.dtype)
        self._backward(FeatureBatch(batch=blank, context_features=torch.zeros(*blank.tokens.shape, width, dtype=dtype)))

    def train(self, step: int, features: FeatureBatch) -> None:
        """0-based `step` of all drafters together; no wait for the device but where drafters meet."""
        loss = self._backward(features)
        scalars = torch.stack([loss.loss_sum.detach(), loss.weight_sum])
        loss_sum, weight_sum = self._sum.sum(self._rank, self._optimizer.flat_grad, scalars)
        self._grad_norm = self._optimizer.step(step, loss_sum, weight_sum)
        if self._device.type == "cpu":
            self._check_finite()

    def report(self, done: int) -> StepReport:
        """What happened since the last report; waits for the device."""
        self._check_finite()
        context_tokens = int(self._context_tokens.item())
        self._context_tokens.zero_()
        lr = learning_rate(self._config, done - 1)
        return StepReport(self._rank, done, self._metrics.read(), context_tokens, lr, self._grad_norm.item())

    def check_equal(self) -> None:
        """Refuse parameters that a step was not applied to, or whose bits are not the others'; waits for the device."""
        self._check_finite()
        sums = [parameter.detach().view(torch.int32).sum() for parameter in self.model.parameters()]
        self._sum.check_equal(self._rank, torch.stack(sums))

    def _backward(self, features: FeatureBatch) -> LossParts:
        features, spec = _take(features, self._device), self._parts.spec
        labels, weights = block_labels(features.batch, spec.block_size, self._config.loss_gamma)
        mask = draft_mask(features.batch, spec.block_size)
        hidden = forward_blocks(self.model, self._parts.embedding, features, mask)
        loss = drafter_loss(hidden, self._parts.head, labels, weights)
        self._optimizer.zero_grad()
        loss.loss_sum.backward()
        self._metrics.add(loss, weights, features.batch.anchor_valid)
        self._context_tokens += (features.batch.doc_ids != NO_DOCUMENT).sum()
        return loss

    def _check_finite(self) -> None:
        self._optimizer.check(len(self._config.pipeline.drafter_devices))


def _take(features: FeatureBatch, device: torch.device) -> FeatureBatch:
    """The features on `device`; what lay on a GPU is not given to its allocator before this thread has read it."""
    if features.context_features.is_cuda:
        lent = [features.context_features, *(getattr(features.batch, f.name) for f in dataclasses.fields(Batch))]
        for tensor in lent:
            if isinstance(tensor, Tensor):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return FeatureBatch(
        batch=features.batch.to(device), context_features=features.context_features.to(device, non_blocking=True)
    )


def _enter(device: torch.device, wiring: Wiring) -> None:
    """Make this thread a worker on `device`: backward stays in it, on a GPU it has a stream, on the CPU its share of cores."""
    torch.autograd.set_multithreading_enabled(False)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
    else:
        torch.set_num_threads(wiring.cpu_threads)
