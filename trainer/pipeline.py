"""A run from its configuration to its last step: load, wire, start, supervise, stop.

`train` runs in the main thread, which only reads its mailbox and reports: whatever takes time happens in a worker, so a signal
is answered at once. The first `Died` in the mailbox is the cause of the end; errors of workers that it pulled along come later
and are not looked at.
"""

import contextlib
import dataclasses
import functools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.checkpoint import TrainingState, check_trained_as, load_training_state, trained_for, trained_with
from trainer.config import TrainConfig
from trainer.dataset import Shards, check_fits, open_shards
from trainer.drafter import Drafter, DraftParts
from trainer.errors import ConfigError, TrainerError, WorkerError, sentence
from trainer.events import EventLog
from trainer.model.draft import DraftModel, DraftSpec, TargetInfo, build_draft, resolve_draft
from trainer.model.target import TargetModel, load_target, load_tokenizer, resolve_mask_token_id, tokenizer_digest
from trainer.packing import batches, packing_waste
from trainer.report import Reporter
from trainer.wiring import (
    STALL_S,
    Died,
    Ended,
    GateOpened,
    Mailbox,
    Message,
    Saved,
    StepReport,
    Validated,
    Wiring,
    Worker,
    run_worker,
    wire,
)
from trainer.workers import batch_prefetcher, drafter_train_loop, target_forward_loop

JOIN_S = 5.0
"""How long a failing run waits for its workers."""
HEARTBEAT_S = 30.0
"""How often a run says that it is alive, whatever else it says."""
LOAD_S = 12 * 3600.0
"""How long loading may take; a hub id may have to be downloaded."""
SWITCH_INTERVAL_S = 5e-4
"""How long a thread may keep the interpreter while others want it; torch's launches need it often and briefly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What a run needs in memory before its workers start."""

    shards: Shards
    held_out: Shards | None = None
    """Only if the run validates."""
    targets: dict[str, TargetModel]
    """By device; loops of one device share it, for they only read."""
    initial: DraftModel
    """What every drafter starts as, in host memory."""
    ends: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Embedding and head by drafter device."""
    resumed: TrainingState | None = None
    """What an earlier run left to go on from."""
    packing_waste: float | None = None
    """The share of an epoch that is padding; `train` adds it."""

    @property
    def spec(self) -> DraftSpec:
        """The drafter's shape."""
        return self.initial.spec

    @property
    def info(self) -> TargetInfo:
        """The target's shape."""
        return next(iter(self.targets.values())).info


def train(
    config: TrainConfig,
    folder: Path | None,
    event_log: EventLog,
    mailbox: Mailbox | None = None,
    load: Callable[[TrainConfig], Loaded] | None = None,
) -> None:
    """Train as `config` says and write checkpoints below `folder`, if one is given; the events end with `finished` or `failed`.

    Raises the first cause of a failure. Then workers that hang may still be alive: the caller has to end the process. An
    exception that anybody puts into `mailbox` stops the run and is raised. `load` replaces the reading of target and data.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    reporter = Reporter(config, event_log)
    crew = _Crew(mailbox or queue.SimpleQueue(), reporter.heartbeat)
    reporter.started()
    try:
        _check_devices(config)
        loaded = crew.load(lambda: _completed(config, (load or load_all)(config)))
        assert loaded.packing_waste is not None
        reporter.loaded(loaded.spec, loaded.shards, loaded.packing_waste)
        first_step = loaded.resumed.step if loaded.resumed else 0
        wiring = wire(config, on_open=lambda: _open(crew, reporter, wiring, loaded), first_step=first_step)
        crew.on_abort = wiring.abort
        _start(crew, wiring, loaded, folder / "checkpoints" if folder else None)
        for message in crew.messages(STALL_S):
            _report(reporter, message)
        reporter.finished()
    except BaseException as error:
        worker, step = crew.place_of(error)
        try:
            with contextlib.suppress(TrainerError):  # the first cause counts, not a disk that is full by now
                reporter.failed(sentence(error), worker, step)
        finally:
            crew.abort(error)
        raise
    finally:
        if config.uses_cuda:
            torch.compiler.set_stance("default")
        reporter.close()


def _open(crew: "_Crew", reporter: Reporter, wiring: Wiring, loaded: Loaded) -> None:
    """Runs in the last worker's thread before anybody passes: counters start, and from here on compiling is a fault."""
    if wiring.config.uses_cuda and wiring.config.pipeline.graphs != "lazy":
        torch.compiler.set_stance("fail_on_recompile")
    reporter.opening(wiring, loaded.spec, loaded.info)
    crew.mailbox.put(GateOpened())


def _check_devices(config: TrainConfig) -> None:
    available = torch.cuda.device_count()
    if config.num_gpus > available:
        raise ConfigError(
            f"pipeline: target_devices and drafter_devices need {config.num_gpus} GPUs, for they name "
            f"cuda:{config.num_gpus - 1}; torch sees {available} here"
        )


def _completed(config: TrainConfig, loaded: Loaded) -> Loaded:
    """With what takes time to count, once the GPUs have finished copying: workers read on streams of their own."""
    waste = packing_waste(loaded.shards.lengths, config)
    for device in {*loaded.targets, *loaded.ends}:
        if device != "cpu":
            torch.cuda.synchronize(device)
    return dataclasses.replace(loaded, packing_waste=waste)


def load_all(config: TrainConfig) -> Loaded:
    """Target and data as `config` names them; data first, for it is quick to refuse; raises TrainerError."""
    root = Path(config.run.root)
    shards = open_shards(root / config.data.path, "train")
    held_out = open_shards(root / config.data.path, "held_out") if config.run.validate_every else None
    resumed = None
    if config.run.resume:
        resumed = load_training_state(_resume_folder(config), trained_with(config, shards.checksum))
    tokenizer = load_tokenizer(config.target, root)
    targets = {
        device: load_target(
            config.target, root, torch.device(device), config.draft, to_end=config.optim.loss_labels == "logits"
        )
        for device in dict.fromkeys(config.pipeline.target_devices)
    }
    target = next(iter(targets.values()))
    spec = resolve_draft(config.draft, target.info, resolve_mask_token_id(config.draft, tokenizer, target.info))
    if resumed is not None:
        check_trained_as(_resume_folder(config), resumed, trained_for(spec, target.info))
    for split in filter(None, (shards, held_out)):
        check_fits(
            split,
            row_tokens=config.batch.row_tokens,
            vocab_size=target.info.vocab_size,
            tokenizer_digest=tokenizer_digest(tokenizer),
            mask_token_id=spec.mask_token_id,
        )
    ends = ends_by_device(target, config, spec)
    initial = build_draft(spec, config.run.seed, torch.device("cpu"))
    return Loaded(shards=shards, held_out=held_out, targets=targets, initial=initial, ends=ends, resumed=resumed)


def _resume_folder(config: TrainConfig) -> Path:
    return Path(config.run.root) / str(config.run.resume)


def ends_by_device(target: TargetModel, config: TrainConfig, spec: DraftSpec) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Embedding and head once for each drafter device, however many drafters it has."""
    return {d: target.ends(torch.device(d), spec.dtype) for d in dict.fromkeys(config.pipeline.drafter_devices)}


def _start(crew: "_Crew", wiring: Wiring, loaded: Loaded, checkpoints: Path | None) -> None:
    pipeline = wiring.config.pipeline
    source = batches(loaded.shards, wiring.config, wiring.first_step * len(pipeline.drafter_devices))
    held_out = functools.partial(batches, loaded.held_out, wiring.config) if loaded.held_out else None
    crew.start("prefetch-0", functools.partial(batch_prefetcher, wiring=wiring, source=source, held_out=held_out))
    for rank, device in enumerate(pipeline.target_devices):
        loop = functools.partial(target_forward_loop, wiring=wiring, rank=rank, target=loaded.targets[device])
        crew.start(f"target-{rank}", loop)
    for rank, device in enumerate(pipeline.drafter_devices):
        embedding, head = loaded.ends[device]
        parts = DraftParts(
            initial=loaded.initial,
            resumed=loaded.resumed,
            trained_with=trained_with(wiring.config, loaded.shards.checksum) | trained_for(loaded.spec, loaded.info),
            info=loaded.info,
            embedding=embedding,
            head=head,
            checkpoints=checkpoints,
        )
        make: Callable[[], Drafter] = functools.partial(Drafter, wiring, rank, parts)
        if pipeline.graphs == "mainwarm":
            make = _made_here(make)
        crew.start(f"draft-{rank}", functools.partial(drafter_train_loop, wiring=wiring, rank=rank, make=make))


def _made_here(make: Callable[[], Drafter]) -> Callable[[], Drafter]:
    """`mainwarm`, unsound: the main thread compiles and warms up, the worker that is given the drafter only replays.

    Reduce-overhead mode then keeps the graphs of all drafters of a device in one tree, which takes them for one model.
    """
    drafter = make()
    return drafter.moved_to_this_thread


def _report(reporter: Reporter, message: Message) -> None:
    match message:
        case GateOpened():
            reporter.gate_open()
        case StepReport():
            reporter.step_report(message)
        case Validated():
            reporter.validated(message)
        case Saved():
            reporter.saved(message)


class _Crew:
    """The worker threads of a run, and what they say."""

    def __init__(self, mailbox: Mailbox, beat: Callable[[int | None, float], None]) -> None:
        self.mailbox = mailbox
        self._beat = beat
        self._beaten = self._moved = time.monotonic()
        self._progress: list[tuple[int | None, int]] = []
        self.on_abort: Callable[[BaseException], None] = lambda _cause: None
        self._threads: dict[str, threading.Thread] = {}
        self._workers: dict[str, Worker] = {}
        self._died: Died | None = None

    def start(self, name: str, body: Callable[[Worker], None]) -> None:
        worker = self._workers[name] = Worker(name, self.mailbox)
        thread = self._threads[name] = threading.Thread(target=run_worker, args=(worker, body), name=name, daemon=True)
        thread.start()

    def load(self, load: Callable[[], Loaded]) -> Loaded:
        """What `load` returns, made in a thread of its own."""
        loaded: list[Loaded] = []
        self.start("load", lambda _worker: loaded.append(load()))
        for message in self.messages(LOAD_S):
            raise AssertionError(f"nobody else works yet, got {message}")
        return loaded[0]

    def messages(self, stall_s: float) -> Iterator[Message]:
        """What the workers say until all have ended; raises the first cause if one died, WorkerError if none moves."""
        while self._threads:
            message = self._next(stall_s)
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, Died):
                self._died = message
                raise message.error
            if isinstance(message, Ended):
                self._threads.pop(message.worker).join(JOIN_S)
            else:
                yield message

    def place_of(self, error: BaseException) -> tuple[str | None, int | None]:
        """Worker and step that `error` came from; else no worker, and the step that the drafters are in."""
        if self._died is not None and self._died.error is error:
            return self._died.worker, self._died.step
        return None, self._drafters_step()

    def abort(self, cause: BaseException) -> None:
        """Wake all workers and give them JOIN_S to leave."""
        self.on_abort(cause)
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _next(self, stall_s: float) -> Message | BaseException:
        """The next message; meanwhile a heartbeat now and then. Raises WorkerError when nothing has moved for `stall_s`."""
        while True:
            message = None
            with contextlib.suppress(queue.Empty):
                message = self.mailbox.get(timeout=min(stall_s, HEARTBEAT_S))
            progress = [(worker.step, worker.moves) for worker in self._workers.values()]
            now = time.monotonic()
            if message is not None or progress != self._progress:
                self._progress, self._moved = progress, now
            if now - self._beaten >= HEARTBEAT_S:
                self._beaten = now
                self._beat(self._drafters_step(), now - self._moved)
            if message is not None:
                return message
            if now - self._moved >= stall_s:
                raise WorkerError(f"no worker has moved for {stall_s:g} s: {', '.join(self._threads)}")

    def _drafters_step(self) -> int | None:
        steps = [worker.step for name, worker in self._workers.items() if name.startswith("draft-") and worker.step]
        return max(steps, default=None)
