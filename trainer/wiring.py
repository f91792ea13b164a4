"""What the workers of one run share, and what their threads tell the supervisor.

A module of its own because the three stages and the supervisor meet here and nowhere else. Channels, gates and the drafters'
meeting point have locks of their own; facts are written by the worker that they are of.
"""

import math
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer.averaging import DrafterSum
from trainer.batch import Batch
from trainer.channel import Channel
from trainer.config import TrainConfig
from trainer.gate import StartupGate
from trainer.graphs import StageFacts
from trainer.metrics import Totals
from trainer.slots import Slot

STALL_S = 1800.0
"""No wait between workers lasts longer; a stage that hangs ends the run by then."""

_COMPILATIONS = 64
"""Of one function: one for each GPU and shape, all wanted. torch stops at 8."""


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
class Validated:
    """What the drafters make of the held-out split after `step` steps."""

    step: int
    totals: Totals


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


Message = GateOpened | StepReport | Validated | Saved | Ended | Died
Mailbox = queue.SimpleQueue[Message | BaseException]
"""What the supervisor reads. A bare exception comes from a signal handler: stop, with this as the cause."""


@dataclass(slots=True)
class Worker:
    """A thread's name, its line to the supervisor and how far it is."""

    name: str
    mailbox: Mailbox
    step: int | None = None
    """The step that its current batch belongs to, counted from 1."""
    moves: int = 0
    """Raised with whatever it gets done beside steps: a long start or validation is no stall."""


def run_worker(worker: Worker, body: Callable[[Worker], None]) -> None:
    """A worker thread's outermost frame: does `body`, then tells how it ended."""
    try:
        body(worker)
    except BaseException as error:  # noqa: BLE001 (the supervisor decides)
        worker.mailbox.put(Died(worker.name, worker.step, error))
    else:
        worker.mailbox.put(Ended(worker.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """The channels, gates and devices of a run; `wire` makes it."""

    config: TrainConfig
    first_step: int
    """Steps that an earlier run has done."""
    captured: StartupGate
    """Phase 1: drafters, then targets, compile and capture one by one; then it opens."""
    gate: StartupGate
    """Phase 2: groups, pinned memory, a dry batch through everything; then training begins."""
    batches: list[Channel[Batch]]
    """By target."""
    features: dict[tuple[int, int], Channel[Slot]]
    """By target and drafter, only the pairs that meet: slots that are filled."""
    free: dict[tuple[int, int], Channel[Slot]]
    """The way back, and where the drafter puts its slots at first."""
    slots: dict[tuple[int, int], list[Slot]] = field(default_factory=dict)
    """All slots, made by the drafters in phase 1, before the targets read them there."""
    drafter_sum: DrafterSum
    facts: dict[str, StageFacts]
    """By worker."""
    cpu_threads: int
    """What each CPU worker computes with."""

    def abort(self, cause: BaseException) -> None:
        """Wake every worker that waits, and stop every one that will."""
        self.captured.abort(cause)
        self.gate.abort(cause)
        self.drafter_sum.abort()
        for channel in [*self.channels, *self.free.values()]:
            channel.abort(cause)

    @property
    def channels(self) -> list[Channel[Batch] | Channel[Slot]]:
        """Those that carry batches forward."""
        return [*self.batches, *self.features.values()]

    @property
    def dry_batches(self) -> int:
        """As many as it takes to use every slot channel once."""
        return len(self.features)


def wire(config: TrainConfig, on_open: Callable[[], None], first_step: int = 0) -> Wiring:
    """Channels and gates for `config`; `on_open` runs when the gate opens."""
    pipeline, capacity = config.pipeline, config.pipeline.channel_capacity
    num_targets, num_drafters = len(pipeline.target_devices), len(pipeline.drafter_devices)
    pairs = [(i % num_targets, i % num_drafters) for i in range(math.lcm(num_targets, num_drafters))]
    devices = {f"draft-{i}": device for i, device in enumerate(pipeline.drafter_devices)}
    devices |= {f"target-{i}": device for i, device in enumerate(pipeline.target_devices)}
    parties = [*devices, "prefetch-0"]
    return Wiring(
        config=config,
        first_step=first_step,
        captured=StartupGate(parties, on_open=lambda: None),
        gate=StartupGate(parties, on_open=on_open),
        batches=[Channel(f"batches-{t}", 2) for t in range(num_targets)],
        features={(t, d): Channel(f"features-{t}-{d}", capacity) for t, d in pairs},
        free={(t, d): Channel(f"free-{t}-{d}", capacity) for t, d in pairs},
        drafter_sum=DrafterSum(pipeline.drafter_devices, timeout_s=STALL_S),
        facts={name: StageFacts(device) for name, device in devices.items()},
        cpu_threads=max(1, torch.get_num_threads() // len(devices)),
    )


def enter(device: torch.device, wiring: Wiring) -> None:
    """Make this thread a worker on `device`: backward stays in it, on a GPU it has a stream, on the CPU its share of cores."""
    torch.autograd.set_multithreading_enabled(False)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
        torch._dynamo.config.recompile_limit = _COMPILATIONS  # the setting belongs to a thread since torch 2.12
    else:
        torch.set_num_threads(wiring.cpu_threads)
