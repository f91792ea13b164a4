"""A run from its configuration to its last step: load, wire, start, supervise, stop.

`train` runs in the main thread, which only reads its mailbox and reports: whatever takes time happens in a worker, so a signal
is answered at once. The first `Died` in the mailbox is the cause of the end; errors of workers that it pulled along come later
and are not looked at.
"""

import contextlib
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.averaging import DrafterSum
from trainer.channel import Channel
from trainer.config import TrainConfig
from trainer.dataset import Shards, check_fits, open_shards
from trainer.errors import ConfigError, TrainerError, WorkerError
from trainer.events import EventLog
from trainer.gate import StartupGate
from trainer.model.draft import DraftSpec, resolve_draft
from trainer.model.target import TargetModel, load_target, load_tokenizer, resolve_mask_token_id, tokenizer_digest
from trainer.packing import batches
from trainer.report import Reporter
from trainer.workers import (
    STALL_S,
    Died,
    DraftParts,
    Ended,
    GateOpened,
    Mailbox,
    Message,
    Saved,
    StepReport,
    Wiring,
    Worker,
    batch_prefetcher,
    drafter_train_loop,
    run_worker,
    target_forward_loop,
)

JOIN_S = 5.0
"""How long a failing run waits for its workers."""
LOAD_S = 12 * 3600.0
"""How long loading may take; a hub id may have to be downloaded."""


def train(config: TrainConfig, folder: Path, event_log: EventLog, mailbox: Mailbox | None = None) -> None:
    """Train as `config` says and write checkpoints below `folder`; the events end with `finished` or `failed`.

    Raises the first cause of a failure. Then workers that hang may still be alive: the caller has to end the process. An
    exception that anybody puts into `mailbox` stops the run and is raised.
    """
    _refuse_graphs(config)
    reporter, crew = Reporter(config, event_log), _Crew(mailbox or queue.SimpleQueue())
    reporter.started()
    try:
        _check_devices(config)
        loaded = crew.load(lambda: _load(config))
        reporter.loaded(loaded.spec, loaded.shards)
        wiring = _wire(config, crew)
        _start(crew, wiring, loaded, folder / "checkpoints")
        for message in crew.messages(STALL_S):
            _report(reporter, wiring, message)
        reporter.finished()
    except BaseException as error:
        worker, step = crew.place_of(error)
        try:
            with contextlib.suppress(TrainerError):  # the first cause counts, not a disk that is full by now
                reporter.failed(_sentence(error), worker, step)
        finally:
            crew.abort(error)
        raise


def _refuse_graphs(config: TrainConfig) -> None:
    if config.pipeline.graphs != "none":
        raise ConfigError(
            f"pipeline.graphs must be none, got {config.pipeline.graphs}: this build trains on GPUs without CUDA graphs"
        )


def _check_devices(config: TrainConfig) -> None:
    available = torch.cuda.device_count()
    if config.num_gpus > available:
        raise ConfigError(
            f"pipeline: target_devices and drafter_devices need {config.num_gpus} GPUs, for they name "
            f"cuda:{config.num_gpus - 1}; torch sees {available} here"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    shards: Shards
    targets: dict[str, TargetModel]
    """By device; loops of one device share it, for they only read."""
    spec: DraftSpec
    ends: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Embedding and head by drafter device."""


def _load(config: TrainConfig) -> _Loaded:
    """Data first, for it is quick to refuse; raises TrainerError."""
    root = Path(config.run.root)
    shards = open_shards(root / config.data.path, "train")
    tokenizer = load_tokenizer(config.target, root)
    targets = {
        device: load_target(config.target, root, torch.device(device), config.draft)
        for device in dict.fromkeys(config.pipeline.target_devices)
    }
    target = next(iter(targets.values()))
    spec = resolve_draft(config.draft, target.info, resolve_mask_token_id(config.draft, tokenizer, target.info))
    check_fits(
        shards,
        row_tokens=config.batch.row_tokens,
        vocab_size=target.info.vocab_size,
        tokenizer_digest=tokenizer_digest(tokenizer),
        mask_token_id=spec.mask_token_id,
    )
    ends = {device: target.ends(torch.device(device), spec.dtype) for device in config.pipeline.drafter_devices}
    return _Loaded(shards=shards, targets=targets, spec=spec, ends=ends)


def _wire(config: TrainConfig, crew: "_Crew") -> Wiring:
    num_targets, num_drafters = len(config.pipeline.target_devices), len(config.pipeline.drafter_devices)
    capacity = config.pipeline.channel_capacity
    pairs = [(i % num_targets, i % num_drafters) for i in range(math.lcm(num_targets, num_drafters))]
    names = ["prefetch-0", *(f"target-{i}" for i in range(num_targets)), *(f"draft-{i}" for i in range(num_drafters))]
    wiring = Wiring(
        config=config,
        gate=StartupGate(names, on_open=lambda: crew.mailbox.put(GateOpened())),
        batches=[Channel(f"batches-{t}", capacity) for t in range(num_targets)],
        features={(t, d): Channel(f"features-{t}-{d}", capacity) for t, d in pairs},
        drafter_sum=DrafterSum(num_drafters, timeout_s=STALL_S),
        cpu_threads=max(1, torch.get_num_threads() // (num_targets + num_drafters)),
    )
    crew.on_abort = wiring.abort
    return wiring


def _start(crew: "_Crew", wiring: Wiring, loaded: _Loaded, checkpoints: Path) -> None:
    pipeline = wiring.config.pipeline
    source = batches(loaded.shards, wiring.config)
    crew.start("prefetch-0", functools.partial(batch_prefetcher, wiring=wiring, source=source))
    for rank, device in enumerate(pipeline.target_devices):
        loop = functools.partial(target_forward_loop, wiring=wiring, rank=rank, target=loaded.targets[device])
        crew.start(f"target-{rank}", loop)
    info = next(iter(loaded.targets.values())).info
    for rank, device in enumerate(pipeline.drafter_devices):
        embedding, head = loaded.ends[device]
        parts = DraftParts(spec=loaded.spec, info=info, embedding=embedding, head=head, checkpoints=checkpoints)
        crew.start(f"draft-{rank}", functools.partial(drafter_train_loop, wiring=wiring, rank=rank, parts=parts))


def _report(reporter: Reporter, wiring: Wiring, message: Message) -> None:
    match message:
        case GateOpened():
            reporter.gate_open(wiring)
        case StepReport():
            reporter.step_report(message)
        case Saved():
            reporter.saved(message)


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"


class _Crew:
    """The worker threads of a run, and what they say."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.on_abort: Callable[[BaseException], None] = lambda _cause: None
        self._threads: dict[str, threading.Thread] = {}
        self._workers: dict[str, Worker] = {}
        self._died: Died | None = None

    def start(self, name: str, body: Callable[[Worker], None]) -> None:
        worker = self._workers[name] = Worker(name, self.mailbox)
        thread = self._threads[name] = threading.Thread(target=run_worker, args=(worker, body), name=name, daemon=True)
        thread.start()

    def load(self, load: Callable[[], _Loaded]) -> _Loaded:
        """What `load` returns, made in a thread of its own."""
        loaded: list[_Loaded] = []
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
        steps = [worker.step for name, worker in self._workers.items() if name.startswith("draft-") and worker.step]
        return None, max(steps, default=None)

    def abort(self, cause: BaseException) -> None:
        """Wake all workers and give them JOIN_S to leave."""
        self.on_abort(cause)
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _next(self, stall_s: float) -> Message | BaseException:
        while True:
            before = [worker.step for worker in self._workers.values()]
            try:
                return self.mailbox.get(timeout=stall_s)
            except queue.Empty:
                if before == [worker.step for worker in self._workers.values()]:
                    raise WorkerError(f"no worker has moved for {stall_s:g} s: {', '.join(self._threads)}") from None
