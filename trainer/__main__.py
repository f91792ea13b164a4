"""`python -m trainer CONFIG.json`: one training run; its folder is the one that holds CONFIG.json.

Writes events.jsonl and checkpoints/ there and a line an interval to stdout; those of an earlier start are moved aside, as
events.1.jsonl and checkpoints.1, or the next number, where `run.resume` still finds them. Exit code 0: all steps are done. A
user's error is one sentence on stderr and its own code; anything else a traceback and 1; a signal 128 + its number. The only
place that exits, sets up logging or handles signals.
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
    if len(argv) != 1:
        sys.stderr.write("usage: python -m trainer CONFIG.json\n")
        return 2
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
    try:
        text = path.read_text(encoding="utf-8")
        aside = _set_aside(path.parent)
        log = events.EventLog(path.parent / "events.jsonl")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be used: {error}") from None
    try:
        config = TrainConfig.from_json(path, text)
        _follow(config.run, path.parent / "checkpoints", aside)
        from trainer import pipeline  # imports torch: seconds that a mistyped configuration need not wait for

        pipeline.train(config, path.parent, log, mailbox)
    except BaseException as error:
        with contextlib.suppress(TrainerError):  # the first cause counts, not a disk that is full by now
            log.write(events.FAILED, error=f"{error}", worker=None, step=None)  # unless the pipeline has done so
        raise
    finally:
        log.close()


def _set_aside(folder: Path) -> Path:
    """Keep what an earlier start left, under the first number that is free for both; returns where its checkpoints are now.

    Raises OSError. What a killed save has left half written goes.
    """
    for path in (folder / "checkpoints").glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    return folder / f"checkpoints.{events.set_aside(folder, 'events.jsonl', 'checkpoints')}"


def _follow(run: RunConfig, checkpoints: Path, aside: Path) -> None:
    """Let `run.resume` name a checkpoint of the earlier start where it is now."""
    given = (Path(run.root) / (run.resume or "")).resolve()
    if run.resume and given.is_relative_to(checkpoints.resolve()):
        run.resume = str(aside.resolve() / given.relative_to(checkpoints.resolve()))


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
