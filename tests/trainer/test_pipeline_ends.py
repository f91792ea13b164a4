"""How a run ends when something in it fails: at once, with the first cause, and nothing half applied or saved."""

import dataclasses
import itertools
import math
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_runs import ENDS_WITHIN_S, InjectedError, events_of, recording, run, until, workers_alive

import trainer.drafter
import trainer.pipeline
import trainer.report
import trainer.wiring
from trainer.batch import Batch
from trainer.channel import Channel
from trainer.errors import ConfigError, NonFiniteError, TrainerError, WorkerError
from trainer.events import EventLog
from trainer.loss import LossParts, blocks_loss
from trainer.model.target import TargetModel
from trainer.optim import DraftOptimizer
from trainer.packing import batches
from trainer.wiring import Mailbox


def fail_in(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, thread: str, call: int, error: BaseException, first: Any = None
) -> None:
    """Raise in the given call of `owner.name` that `thread` makes, after calling `first`; the dry run is call 1."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == thread and next(calls) == call:
            if first is not None:
                first()
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


def expect_failure(config: dict[str, Any], folder: Path, worker: str | None, error: BaseException) -> dict[str, Any]:
    began = time.monotonic()
    with pytest.raises(type(error)) as caught:
        run(config, folder)
    assert caught.value is error
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert workers_alive() == []
    last = events_of(folder)[-1]
    assert (last["event"], last["worker"]) == ("failed", worker)
    assert str(error) in last["error"]
    return last


@pytest.mark.parametrize(
    ("owner", "name", "thread"),
    [
        (trainer.pipeline, "open_shards", "load"),
        (trainer.pipeline, "load_target", "load"),
        (TargetModel, "context_features", "target-1"),
        (trainer.drafter, "copy_draft", "draft-1"),
        (trainer.drafter, "blocks_loss", "draft-0"),
    ],
)
def test_a_death_before_the_gate_ends_the_run(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, thread: str
) -> None:
    error = InjectedError(f"in {thread}")
    fail_in(monkeypatch, owner, name, thread, 1, error)
    last = expect_failure(tiny_run.config(targets=2, drafters=2), tmp_path, thread, error)
    assert last["step"] is None
    assert [event["event"] for event in events_of(tmp_path)] == ["started", "failed"]


def test_a_prefetcher_that_dies_ends_the_run(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = InjectedError("no more")

    def dying(*args: Any) -> Iterator[Batch]:
        yield from itertools.islice(batches(*args), 5)
        raise error

    monkeypatch.setattr(trainer.pipeline, "batches", dying)
    last = expect_failure(tiny_run.config(drafters=2, run={"steps": 10_000}), tmp_path, "prefetch-0", error)
    assert last["step"] == 3


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Channel[Any]]:
    """The channels of the next run, by name."""
    made: dict[str, Channel[Any]] = {}

    def make(name: str, capacity: int) -> Channel[Any]:
        return made.setdefault(name, Channel(name, capacity))

    monkeypatch.setattr(trainer.wiring, "Channel", make)
    return made


def test_a_drafter_that_dies_while_the_target_sends_ends_the_run(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: dict[str, Channel[Any]]
) -> None:
    def target_waits_for_room() -> None:
        before = channels["free-0-0"].statistics().receive_wait_s
        until(lambda: channels["free-0-0"].statistics().receive_wait_s > before + 0.02)

    error = InjectedError("mid-send")
    fail_in(monkeypatch, trainer.drafter, "blocks_loss", "draft-0", 3, error, first=target_waits_for_room)
    last = expect_failure(tiny_run.config(run={"steps": 10_000}), tmp_path, "draft-0", error)
    assert last["step"] == 2


def test_a_target_that_dies_while_the_drafter_waits_ends_the_run(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: dict[str, Channel[Any]]
) -> None:
    def drafter_waits_for_features() -> None:
        before = channels["features-0-0"].statistics().receive_wait_s
        until(lambda: channels["features-0-0"].statistics().receive_wait_s > before + 0.02)

    error = InjectedError("starved")
    fail_in(monkeypatch, TargetModel, "context_features", "target-0", 4, error, first=drafter_waits_for_features)
    last = expect_failure(tiny_run.config(run={"steps": 10_000}), tmp_path, "target-0", error)
    assert last["step"] == 3


def test_a_drafter_that_dies_after_the_others_have_left_ends_the_run(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = InjectedError("after close")
    alone = lambda: until(lambda: workers_alive() == ["draft-0"])  # noqa: E731
    fail_in(monkeypatch, trainer.drafter, "blocks_loss", "draft-0", 2, error, first=alone)
    config = tiny_run.config(pipeline={"channel_capacity": 64})
    assert expect_failure(config, tmp_path, "draft-0", error)["step"] == 1


def test_a_drafter_that_dies_while_others_wait_for_it_ends_the_run(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meetings: list[Any] = []
    monkeypatch.setattr(trainer.wiring, "DrafterSum", recording(trainer.wiring.DrafterSum, meetings))
    others_wait = lambda: until(lambda: meetings[0]._barrier.n_waiting == 2)  # noqa: E731
    error = InjectedError("in the barrier")
    fail_in(monkeypatch, trainer.drafter, "blocks_loss", "draft-1", 4, error, first=others_wait)
    last = expect_failure(tiny_run.config(drafters=3, run={"steps": 10_000}), tmp_path, "draft-1", error)
    assert last["step"] == 3


def test_drafters_that_drift_apart_end_the_run(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = trainer.drafter.copy_draft

    def copied(initial: Any, device: torch.device) -> Any:
        model = original(initial, device)
        if threading.current_thread().name == "draft-1":
            with torch.no_grad():
                model.norm.weight[0] += 1e-3
        return model

    monkeypatch.setattr(trainer.drafter, "copy_draft", copied)
    with pytest.raises(AssertionError, match="drafters are not bit-equal"):
        run(tiny_run.config(drafters=2, run={"checkpoint_every": 2}), tmp_path)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("thread", ["draft-0", "draft-1"])
def test_a_loss_that_is_not_a_number_ends_the_run_and_is_not_applied(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    calls = itertools.count(1)

    def poisoned(*args: Any) -> tuple[LossParts, torch.Tensor]:
        loss, weights = blocks_loss(*args)
        bad = threading.current_thread().name == thread and next(calls) == 4
        return dataclasses.replace(loss, loss_sum=loss.loss_sum * math.nan) if bad else loss, weights

    monkeypatch.setattr(trainer.drafter, "blocks_loss", poisoned)
    with pytest.raises(NonFiniteError, match=r"step \d .*batches 4\.\.5"):
        run(tiny_run.config(drafters=2), tmp_path)
    last = events_of(tmp_path)[-1]
    assert (last["event"], last["step"]) == ("failed", 3)
    assert [event["step"] for event in events_of(tmp_path, "step")] == [1, 2]


def test_a_step_that_was_not_applied_is_not_saved(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, train = DraftOptimizer.check, trainer.drafter.Drafter.train
    training, calls = threading.local(), itertools.count(1)

    def as_on_a_gpu(drafter: Any, *args: Any) -> None:
        training.now = True
        train(drafter, *args)
        training.now = False

    def poisoned(*args: Any) -> tuple[LossParts, torch.Tensor]:
        loss, weights = blocks_loss(*args)
        return dataclasses.replace(loss, loss_sum=loss.loss_sum * math.nan) if next(calls) == 3 else loss, weights

    monkeypatch.setattr(trainer.drafter.Drafter, "train", as_on_a_gpu)
    monkeypatch.setattr(DraftOptimizer, "check", lambda *args: None if getattr(training, "now", False) else check(*args))
    monkeypatch.setattr(trainer.drafter, "blocks_loss", poisoned)
    with pytest.raises(NonFiniteError, match="step 2 "):
        run(tiny_run.config(run={"steps": 8, "log_every": 100, "checkpoint_every": 4}), tmp_path)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("full", ["step", "failed"])
def test_a_full_disk_ends_the_run_with_its_first_cause(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    write, no_room, death = EventLog.write, TrainerError("events.jsonl cannot be written"), InjectedError("first")

    def failing(log: EventLog, event: str, /, **fields: Any) -> bool:
        if event in (full, "failed"):
            raise no_room
        return write(log, event, **fields)

    monkeypatch.setattr(EventLog, "write", failing)
    if full == "failed":
        fail_in(monkeypatch, trainer.drafter, "blocks_loss", "draft-0", 4, death)
    with pytest.raises((TrainerError, InjectedError)) as caught:
        run(tiny_run.config(drafters=2, run={"steps": 10_000}), tmp_path)
    assert caught.value is (death if full == "failed" else no_room)
    assert workers_alive() == []


def test_a_message_from_outside_stops_a_run(tiny_run: Any, tmp_path: Path) -> None:
    mailbox: Mailbox = queue.SimpleQueue()
    stop = threading.Thread(target=stop_after_first_step, args=(tmp_path, mailbox))
    stop.start()
    with pytest.raises(InjectedError):
        run(tiny_run.config(run={"steps": 10_000}), tmp_path, mailbox)
    stop.join(ENDS_WITHIN_S)
    last = events_of(tmp_path)[-1]
    assert (last["event"], last["worker"]) == ("failed", None)
    assert last["step"] >= 1
    assert workers_alive() == []


def stop_after_first_step(folder: Path, mailbox: Mailbox) -> None:
    until(lambda: (folder / "events.jsonl").exists() and '"step"' in (folder / "events.jsonl").read_text())
    mailbox.put(InjectedError("enough"))


def test_more_gpus_than_there_are_is_told_before_anything_is_loaded(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device}")
    monkeypatch.setattr(trainer.pipeline, "open_shards", lambda *_: pytest.fail("loading began"))
    gpus = {"target_devices": ["cuda:0"], "drafter_devices": ["cuda:3"]}
    with pytest.raises(ConfigError, match=r"^pipeline: .* need 4 GPUs, for they name cuda:3; torch sees 1 here$"):
        run(tiny_run.config(pipeline=gpus), tmp_path)
    assert [event["event"] for event in events_of(tmp_path)] == ["started", "failed"]
    assert events_of(tmp_path)[0]["devices"] == {"cuda:0": "the GPU cuda:0", "cuda:3": None}


def test_a_run_in_which_nothing_moves_ends(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    original = trainer.drafter.blocks_loss

    def hanging(*args: Any) -> Any:
        release.wait(ENDS_WITHIN_S)
        return original(*args)

    monkeypatch.setattr(trainer.drafter, "blocks_loss", hanging)
    monkeypatch.setattr(trainer.pipeline, "STALL_S", 0.5)
    monkeypatch.setattr(trainer.pipeline, "JOIN_S", 0.1)
    with pytest.raises(WorkerError, match=r"no worker has moved for 0\.5 s: .*draft-0"):
        run(tiny_run.config(), tmp_path)
    assert events_of(tmp_path)[-1]["event"] == "failed"
    release.set()
    until(lambda: workers_alive() == [])


@pytest.mark.parametrize(("name", "share"), [("_make_slots", 0.6), ("_look", 0.1)])
def test_a_long_start_or_validation_of_workers_that_move_is_no_stall(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, share: float
) -> None:
    clock, looks = [0.0], [0]

    def now() -> float:
        looks[0] += 1
        return clock[0]

    def seen_by_the_supervisor() -> None:
        before = looks[0]
        until(lambda: looks[0] > before + 1)

    original = getattr(trainer.drafter.Drafter, name)

    def slow(*args: Any) -> Any:
        seen_by_the_supervisor()
        clock[0] += share * trainer.pipeline.STALL_S
        seen_by_the_supervisor()
        return original(*args)

    monkeypatch.setattr(trainer.pipeline, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(trainer.pipeline, "HEARTBEAT_S", 0.001)
    monkeypatch.setattr(trainer.drafter.Drafter, name, slow)
    config = tiny_run.config(drafters=3, run={"steps": 2, "validate_every": 2, "validate_batches": 24})
    run(config, tmp_path)
    assert clock[0] > 1.5 * trainer.pipeline.STALL_S
    assert events_of(tmp_path)[-1]["event"] == "finished"


def test_a_run_says_that_it_is_alive_and_when_its_workers_stand_still(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, let_go = itertools.count(1), threading.Event()

    def hanging(*args: Any) -> Any:
        if next(steps) == 4:
            let_go.wait(60)
        return blocks_loss(*args)

    monkeypatch.setattr(trainer.drafter, "blocks_loss", hanging)
    monkeypatch.setattr(trainer.pipeline, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(trainer.report, "OVERDUE_S", 1.0)
    monkeypatch.setattr(trainer.report, "OVERDUE_STEPS", 0)
    training = threading.Thread(target=run, args=(tiny_run.config(run={"steps": 6, "log_every": 1}), tmp_path))
    training.start()
    until(lambda: (tmp_path / "events.jsonl").exists() and any(e["overdue"] for e in events_of(tmp_path, "heartbeat")))
    let_go.set()
    training.join(60)
    beats = events_of(tmp_path, "heartbeat")
    assert next(beat["step"] for beat in beats if beat["overdue"]) in (3, 4)
    assert not beats[0]["overdue"]
    assert all(beat["idle_s"] > 1.0 for beat in beats if beat["overdue"])
    assert events_of(tmp_path)[-1]["event"] == "finished"
