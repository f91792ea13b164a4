"""Runs of the pipeline in this process, and what they left; for the tests of it."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trainer.pipeline
from trainer.config import TrainConfig
from trainer.events import EventLog
from trainer.gate import StartupGate
from trainer.wiring import Mailbox

ENDS_WITHIN_S = 30
"""Far more than an end takes; a run that hangs takes half an hour."""


class InjectedError(Exception):
    """What the tests break workers with."""


def run(config: dict[str, Any], folder: Path, mailbox: Mailbox | None = None) -> None:
    log = EventLog(folder / "events.jsonl")
    try:
        trainer.pipeline.train(TrainConfig.from_dict(config), folder, log, mailbox)
    finally:
        log.close()


def events_of(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if kind in (None, event["event"])]


def workers_alive() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("load", "prefetch-", "target-", "draft-"))]


def until(condition: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + ENDS_WITHIN_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)


def held_until(condition: Callable[[], bool], original: Callable[..., None]) -> Callable[..., None]:
    """`pass_through` for which it is a fault that the prefetcher passes while `condition` does not hold."""

    def pass_through(gate: StartupGate, party: str, *, timeout_s: float) -> None:
        assert party != "prefetch-0" or condition()
        original(gate, party, timeout_s=timeout_s)

    return pass_through


def recording(kind: Callable[..., Any], made: list[Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(kind(*args, **kwargs))
        return made[-1]

    return make
