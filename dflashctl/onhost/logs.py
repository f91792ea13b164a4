"""A run's log on its host: its last lines, and what follows a place in it, however large it is.

A place is an offset and a hash of the bytes before it. So a log that was renamed (logrotate), copied away and truncated
(copytruncate) or begun anew is told by what it holds, not by its name: what was shown so far is looked for in train.log and in
train.log.1, read there to its end, and train.log follows from its start.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import select
import sys
import time
from pathlib import Path
from typing import Any

from dflashctl.onhost import secrets
from dflashctl.onhost.layout import Layout, RunFolder, modified
from dflashctl.onhost.states import LIVING, state_of

BLOCK_BYTES = 1 << 20
"""What one look answers at most, and up to where the beginning of a line is looked for."""

_SEEN_BYTES = 4096
_LINE_CHARS = 2000
_LOOK_S = 0.1
_LINE_END = re.compile(rb"\r\n|\n|\r")
_ROTATED = re.compile(r"[.-][0-9]+")


def peek(args: dict[str, Any]) -> dict[str, Any]:
    """State of one run and what its log holds from `place` on (None: from its last `lines` lines), 1 MiB at most.

    Waits up to `wait_s` for something new or for the run's end, so that following a log costs a call only now and then.
    Answers `state`, `data` (base64), `place` (where to go on: offset, seen), `left` (bytes that the log has beyond it), `log`,
    and `restarted`: what was shown so far is not there any more, and the data are the log's beginning.
    """
    folder = Layout(args["root"]).find_run(args["run"], args["launch_id"])
    place = args["place"] or _last_place(folder, args["lines"])
    deadline = time.monotonic() + args["wait_s"]
    while True:
        state = state_of(folder)  # before the log: what a dead run wrote last is then surely read
        path, offset, restarted = _resume(folder, place)
        data, end = _piece(folder, path, offset, growing=state["state"] in LIVING)
        seen = _seen(path, end)
        if seen is None and end > 0:
            continue  # rotated away since it was read: that file is looked for again, which may have got more
        if end > offset or state["state"] not in LIVING or time.monotonic() > deadline or _listener_left(_LOOK_S):
            break
    return {
        "state": state,
        "data": base64.b64encode(data).decode(),
        "place": {"offset": end, "seen": seen},
        "left": max(0, _size(path) - end),
        "log": str(path),
        "restarted": restarted,
    }


def _piece(folder: RunFolder, path: Path, offset: int, growing: bool) -> tuple[bytes, int]:
    """What is shown from `offset` on, 1 MiB at most and without secrets, and where it ends.

    Of a line that is not whole yet, the end that could be half a secret is left for later; what comes before `offset` is read
    again, for it could be the other half.
    """
    overlap = secrets.overlap(folder)
    before = min(offset, overlap)
    data = _read(path, offset - before, before + BLOCK_BYTES)
    end = len(data)
    if growing or _size(path) > offset - before + end:
        line_end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        end = max(before, line_end, end - overlap)
    masked, end = secrets.mask(folder, data, before, end)
    return masked, offset - before + end


def _listener_left(wait_s: float) -> bool:
    """Waits; True as soon as standard input ends: whoever asked is gone, and nobody needs the answer."""
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


def last_lines(folder: RunFolder, count: int) -> list[str]:
    """The last `count` lines for a message: 1 MiB at most, of each line its last 2000 characters."""
    data = _read(folder.log, line_start(folder.log, count), BLOCK_BYTES)
    lines = _LINE_END.split(secrets.mask(folder, data)[0])
    texts = [line.decode(errors="replace") for line in lines[: -1 if lines[-1] == b"" else None]]
    return [text if len(text) <= _LINE_CHARS else f"...{text[-_LINE_CHARS:]}" for text in texts]


def last_document(args: dict[str, Any]) -> dict[str, Any]:
    """`document`: the JSON value in the last line of a run's log, or None; `lines`: its last lines. Strings are masked."""
    folder = Layout(args["root"]).find_run(args["run"], args["launch_id"])
    last = _read(folder.log, line_start(folder.log, 1), BLOCK_BYTES)
    try:
        document = secrets.mask_all(folder, json.loads(last))
    except (ValueError, RecursionError):
        document = None
    return {"document": document, "lines": last_lines(folder, args["lines"])}


def line_start(path: Path, count: int) -> int:
    """Where the last `count` lines begin, looked for from the end; a carriage return ends a line too (progress bars).

    A line of more than 1 MiB is cut, between two characters, so that what is read and shown is bounded by its lines.
    """
    size = end = _size(path) if count else 0
    later = b""  # the first byte of the block behind this one
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        block = _read(path, start, end - start)
        ends = [match.end() for match in _LINE_END.finditer(block)]
        if block.endswith(b"\r") and later == b"\n":
            ends.pop()  # half of a line end that was counted already
        if end == size and ends and ends[-1] == len(block):
            ends.pop()  # what ends the last line begins no other
        if count <= len(ends):
            return start + ends[-count]
        if not ends and start > 0:
            return start + _half_character(block)
        count -= len(ends)
        end, later = start, block[:1]
    return 0 if count else _size(path)


def _half_character(block: bytes) -> int:
    """How many bytes at the start of a block go on with a UTF-8 character that began before it."""
    found = re.match(rb"[\x80-\xbf]{0,3}", block)
    return found.end() if found else 0


def _last_place(folder: RunFolder, lines: int) -> dict[str, Any]:
    """Where the last lines begin; while a log that was just rotated is still empty, those of the one before it."""
    path = next((path for path in _files(folder) if _size(path)), folder.log)
    offset = line_start(path, lines)
    return {"offset": offset, "seen": _seen(path, offset)}


def _resume(folder: RunFolder, place: dict[str, Any]) -> tuple[Path, int, bool]:
    """File and offset where a log goes on, and whether that is its beginning again, for want of what was shown so far."""
    offset = place["offset"]
    path = next((p for p in _files(folder) if _size(p) and _seen(p, offset) == place["seen"]), None)
    if path is None:
        return folder.log, 0, offset > 0
    if path != folder.log and _size(path) <= offset:
        files = _files(folder)
        newer = next((p for p in reversed(files[: files.index(path)]) if _size(p)), None)
        if newer:
            return newer, 0, False
    return path, offset, False


def _files(folder: RunFolder) -> list[Path]:
    """train.log, then what rotation made of it, the file written last first."""
    rotated = [path for path in folder.path.glob("train.log?*") if _ROTATED.fullmatch(path.name[len("train.log") :])]
    return [folder.log, *sorted(rotated, key=modified, reverse=True)]


def _seen(path: Path, offset: int) -> str | None:
    """A hash of the up to 4096 bytes before `offset`; None where the file ends before it."""
    start = max(0, offset - _SEEN_BYTES)
    data = _read(path, start, offset - start)
    return hashlib.sha256(data).hexdigest() if len(data) == offset - start else None


def _read(path: Path, offset: int, size: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)
    except FileNotFoundError:
        return b""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


VERBS = {"peek": peek, "last_document": last_document}
