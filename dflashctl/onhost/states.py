"""What became of a run, from what it left: pid, exit_code and stopped files, never from a search by name."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from dflashctl.onhost import secrets
from dflashctl.onhost.layout import RunFolder
from dflashctl.onhost.processes import recorded_process

LIVING = ("starting", "running")
UNKNOWN = "unknown"
"""The state of a run whose files this user may not read."""
MAY_LIVE = (*LIVING, UNKNOWN)
"""Unknown is not dead: nothing that such a run may need is taken away."""
CLAIM_GRACE_S = 30.0
SILENT_S = 150.0
"""A trainer writes a heartbeat every 30 s."""
_EVENT_TAIL = 1 << 17


def state_of(folder: RunFolder) -> dict[str, Any]:
    """State, exit code, signal, pid, times and last event of one run; what is not known is None."""
    alive = recorded_process(folder.pid)
    code = _exit_code(folder.exit_code)  # read after the process was looked for: it is written before the process goes
    begun, over = _stamps(folder.times)
    claimed = _mtime(folder.pid)
    state = _state(folder, alive is not None, code, claimed)
    started = begun.clock if begun else claimed
    ended = None if code is None else over.clock if over else _mtime(folder.exit_code)
    begun_anew = state in LIVING and begun is not None and (_mtime(folder.events) or 0.0) < begun.clock
    event = {} if begun_anew else last_event(folder.events)  # what is there is of the life before
    stalled = state == "running" and bool(event) and _is_stalled(folder)
    return {
        "run": folder.run,
        "state": state,
        "exit_code": code,
        "signal": _signal(code),
        "oom_kills": _oom_kills(begun, over),
        "pid": _pid(folder.pid),
        "started_at": _utc(started),
        "ended_at": _utc(ended),
        "duration_s": _duration(begun, over, state) if begun else _age(started, ended),
        "progress": _progress(folder, event, moving=state == "running" and not stalled),
        "step": last_event(folder.events, "step").get("step") if event else None,
        "last_event": event.get("event"),
        "last_event_age_s": _age(_mtime(folder.events), None) if event else None,
        "stalled": stalled,
        "error": secrets.mask_all(folder, str(event.get("error"))) if event.get("event") == "failed" else None,
    }


class Stamp(NamedTuple):
    """What the wrapper wrote down when the trainer started, or ended."""

    clock: float
    """Seconds since 1970, which somebody may set while the run goes on."""
    uptime: float
    """Seconds since the container started, which nobody sets: durations are taken from it."""
    oom_kills: int | None
    """Processes that the kernel had killed for memory in the run's cgroup; None where it does not say."""


def _stamps(path: Path) -> tuple[Stamp | None, Stamp | None]:
    """Of the start and of the end; None where there is none, or none that can be read (a full disk)."""
    found: dict[str, Stamp] = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError):
        lines = []
    for line in lines:
        with contextlib.suppress(ValueError, IndexError):
            word, *numbers = line.split()
            found[word] = Stamp(float(numbers[0]), float(numbers[1]), int(numbers[2]) if numbers[2:] else None)
    return found.get("started"), found.get("ended")


def _oom_kills(begun: Stamp | None, over: Stamp | None) -> int | None:
    """Kills for memory while it ran; None where they are not known."""
    if begun is None or over is None or begun.oom_kills is None or over.oom_kills is None:
        return None
    return over.oom_kills - begun.oom_kills


def _duration(begun: Stamp, over: Stamp | None, state: str) -> float | None:
    """How long it ran, or has run so far; of a run that is lost nobody knows."""
    if over is None and state not in LIVING:
        return None
    try:
        until = over.uptime if over else float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return None
    return round(max(0.0, until - begun.uptime), 3)


def _is_unreadable(folder: RunFolder) -> bool:
    """Whether a file that tells what became of it is there, or may be, and cannot be read: then nothing is known."""
    for path in (folder.pid, folder.exit_code):
        try:
            with open(path, "rb"):
                pass
        except PermissionError:
            return True
        except OSError:
            pass
    return False


def _state(folder: RunFolder, alive: bool, code: int | None, started: float | None) -> str:
    if code is None and not alive and _is_unreadable(folder):
        return UNKNOWN
    if code is not None:
        if folder.stopped.exists():
            return "stopped"
        return "killed" if _signal(code) else "exited"
    if alive:
        return "running"
    if folder.stopped.exists():
        return "stopped"
    claimed = _mtime(folder.record_path)
    fresh = started is None and claimed is not None and abs(time.time() - claimed) < CLAIM_GRACE_S
    return "starting" if fresh else "lost"


def _progress(folder: RunFolder, newest: dict[str, Any], moving: bool) -> dict[str, Any] | None:
    """How far a preparation is, or was when it ended before its end; None of any other run.

    What is no number is None, and so are rate and time left of one that is not `moving` or has not answered for a while.
    """
    told = last_event(folder.events, "progress") if newest.get("event") in ("progress", "heartbeat") else {}
    if not told:
        return None
    rates = ("conversations_per_s", "tokens_per_s", "remaining_s")
    known = {name: told.get(name) if isinstance(told.get(name), (int, float)) else None for name in ("done", "total", *rates)}
    return known if moving and _is_young(told) else {**known, **dict.fromkeys(rates)}


def _is_young(event: dict[str, Any]) -> bool:
    """Whether an event was written less than SILENT_S ago, by its own time, where it has one."""
    try:
        written = datetime.datetime.fromisoformat(str(event.get("time")).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return True
    return time.time() - written < SILENT_S


def _is_stalled(folder: RunFolder) -> bool:
    """Whether a living trainer has missed several heartbeats, or says itself that its workers stand still."""
    beat = last_event(folder.events, "heartbeat")
    silent_s = _age(_mtime(folder.events), None)
    return bool(beat) and (beat.get("overdue") is True or (silent_s or 0.0) > SILENT_S)


def _signal(code: int | None) -> int | None:
    """A shell says 128 + number for a signal; there are 64 of them."""
    return code - 128 if code is not None and 128 < code <= 128 + 64 else None


def last_event(path: Path, kind: str | None = None) -> dict[str, Any]:
    """The newest event (of one kind) in the last 128 KiB of events.jsonl; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _EVENT_TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            event = json.loads(line, parse_constant=lambda _word: None)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and (kind is None or event.get("event") == kind):
            return event
    return {}


def _exit_code(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _pid(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _utc(stamp: float | None) -> str | None:
    if stamp is None:
        return None
    try:
        moment = datetime.datetime.fromtimestamp(stamp, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):  # no moment that a calendar has
        return None
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _age(start: float | None, end: float | None) -> float | None:
    """Seconds from `start` to `end` (None: now), by the host's own clock; never below zero."""
    if start is None:
        return None
    return round(max(0.0, (time.time() if end is None else end) - start), 3)
