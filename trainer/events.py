"""events.jsonl: how a run tells what it does, one JSON object a line.

Written by the trainer, read by the command line, so standard library only. Every event has `event`, `time` (ISO 8601 UTC) and
`elapsed_s` (monotonic, since `started`). The first is `started`, the last `finished` or `failed`; between them `gate_open`,
`step`, `validation`, `checkpoint`, every half minute `heartbeat`, and once `steady`, which proves what `finished` proves again;
`trainer.evaluate` writes a `prompt` for each, `trainer.prepare` its `progress` and heartbeats. Numbers that are not known
are null, and so are those that are not finite: every line is strict JSON.
"""

import contextlib
import datetime
import fcntl
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from trainer.errors import ConfigError, TrainerError

STARTED: Final = "started"
GATE_OPEN: Final = "gate_open"
STEP: Final = "step"
HEARTBEAT: Final = "heartbeat"
STEADY: Final = "steady"
CHECKPOINT: Final = "checkpoint"
VALIDATION: Final = "validation"
PROMPT: Final = "prompt"
PROGRESS: Final = "progress"
FINISHED: Final = "finished"
FAILED: Final = "failed"
FINAL: Final = frozenset({FINISHED, FAILED})


class EventLog:
    """Appends events to one file; any thread may call `write`. After a final event nothing more is written."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; raises OSError."""
        self._path = path
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._ended = False

    def write(self, event: str, /, **fields: Any) -> bool:
        """Append one event and flush it; returns whether it was written (False after a final event); raises TrainerError."""
        with self._lock:
            if self._ended:
                return False
            head = {"event": event, "time": utc_now(), "elapsed_s": round(time.monotonic() - self._start, 3)}
            try:
                self._file.write(json.dumps(_finite(head | fields), allow_nan=False) + "\n")
                self._file.flush()
            except OSError as error:
                raise TrainerError(f"{self._path} cannot be written: {error.strerror}") from error
            self._ended = event in FINAL
            return True

    def close(self) -> None:
        """Close the file; later writes are ignored. Never raises: what could not be written has been told by `write`."""
        with self._lock, contextlib.suppress(OSError):
            self._ended = True
            self._file.close()


@contextlib.contextmanager
def alone_in(folder: Path, refusal: TrainerError | None = None) -> Iterator[None]:
    """Hold `folder` against other runs, until this process dies at the latest.

    Raises `refusal`, by default a ConfigError, if one holds it, and OSError.

    To be held before anything there is set aside: what a living run writes is not an earlier start's.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal or ConfigError(f"{folder.resolve()}: another run works in this folder") from None
        yield
    finally:
        os.close(descriptor)


def free_number(folder: Path) -> int:
    """The first under which nothing of an earlier start is kept there, neither events nor checkpoints."""
    names = ("events.{}.jsonl", "checkpoints.{}")
    return next(n for n in itertools.count(1) if not any((folder / name.format(n)).exists() for name in names))


def set_aside(path: Path, number: int) -> None:
    """Keep what an earlier start left there, as events.1.jsonl and checkpoints.1 or a higher number; raises OSError."""
    if path.exists():
        path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))


def utc_now() -> str:
    """Now, as `utc` has it."""
    return utc(time.time())


def utc(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601 UTC with milliseconds and `Z`; such texts compare as the times do."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_line(line: str) -> dict[str, Any] | None:
    """One event, or None for a line that is torn or no event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
