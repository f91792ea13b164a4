"""`python -m trainer CONFIG.json`: one training run; its folder is the one that holds CONFIG.json.

Writes events.jsonl and checkpoints/ there and a line an interval to stdout; those of an earlier start are moved aside, as
events.1.jsonl and checkpoints.1, or the next number, where `run.resume` still finds them. One process at a time works there.
Exit code 0: all steps are done. A user's error is one sentence on stderr and its own code; anything else a traceback and 1; a
signal 128 + its number. The only place that exits, sets up logging or handles signals.
"""

import contextlib
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from trainer import events
from trainer.config import RunConfig, TrainConfig
from trainer.errors import ConfigError, TrainerError


class Stopped(TrainerError):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        """`number` of the signal."""
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def main(argv: Sequence[str]) -> int:
    """Run to the end; returns the exit code."""
    mailbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def stop(number: int, _frame: FrameType | None) -> None:
        mailbox.put(Stopped(number))

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("trainer").setLevel(logging.INFO)
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        asked = len(argv) == 1
        (sys.stdout if asked else sys.stderr).write("usage: python -m trainer CONFIG.json\n")
        return 0 if asked else 2
    try:
        _run(Path(argv[0]), mailbox)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except Exception:  # noqa: BLE001 (the outermost frame: shown, never hidden)
        traceback.print_exc()
        return 1
    return 0


def _run(path: Path, mailbox: "queue.SimpleQueue[Any]") -> None:
    with contextlib.ExitStack() as held:
        try:
            text = path.read_text(encoding="utf-8")
            held.enter_context(events.alone_in(path.parent))
            number = events.free_number(path.parent)
            events.set_aside(path.parent / "events.jsonl", number)
            log = held.enter_context(contextlib.closing(events.EventLog(path.parent / "events.jsonl")))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be used: {error}") from None
        try:
            _train(path, text, number, log, mailbox)
        except BaseException as error:
            with contextlib.suppress(TrainerError):  # the first cause counts, not a disk that is full by now
                log.write(events.FAILED, error=f"{error}", worker=None, step=None)  # unless the pipeline has done so
            raise


def _train(path: Path, text: str, number: int, log: events.EventLog, mailbox: "queue.SimpleQueue[Any]") -> None:
    config = TrainConfig.from_json(path, text)  # first, so that a typo leaves the checkpoints where they are
    checkpoints = path.parent / "checkpoints"
    try:
        for half in checkpoints.glob(".step-*"):  # what a killed save has left
            shutil.rmtree(half, ignore_errors=True)
        events.set_aside(checkpoints, number)
        _follow(config.run, checkpoints)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from None
    from trainer import pipeline  # imports torch: seconds that a mistyped configuration need not wait for

    pipeline.train(config, path.parent, log, mailbox)


def _follow(run: RunConfig, checkpoints: Path) -> None:
    """Let `run.resume` name a checkpoint of an earlier start where it is now: the last start that had it counts."""
    given, here = (Path(os.path.realpath(path)) for path in (Path(run.root) / (run.resume or ""), checkpoints))
    if not run.resume or not given.is_relative_to(here):  # links in a loop are told by whoever reads them
        return
    name = given.relative_to(here)
    numbers = (path.suffix.removeprefix(".") for path in checkpoints.parent.glob("checkpoints.*"))
    for number in sorted((int(number) for number in numbers if number.isdecimal()), reverse=True):
        aside = checkpoints.with_name(f"checkpoints.{number}").resolve() / name
        if aside.exists():
            run.resume = str(aside)
            return


def leave(code: int) -> None:
    """End the process, also when a worker hangs in native code and cannot be joined."""
    logging.shutdown()
    if threading.active_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
