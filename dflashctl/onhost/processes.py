"""Who is alive, from /proc: a process is its pid and its start time, for a pid alone is soon somebody else's.

The start time of pid 1 stands beside it, since a container that was restarted begins counting again.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

MARK = "DFLASHCTL_LAUNCH_ID"
NAME = "DFLASHCTL_RUN"
UNKNOWN = "-"
"""Stands in a pid file for the start time of a pid 1 that /proc does not show (hidepid)."""


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    ppid: int
    session: int
    start: str
    state: str
    name: str


def read_process(pid: int) -> Process | None:
    """The process of that number, or None; field numbers of /proc/PID/stat are proc(5)'s."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, rest = text.rpartition(")")[0].partition("(")[2], text.rpartition(")")[2].split()
    return Process(pid, int(rest[1]), int(rest[3]), rest[19], rest[0], name)


def all_processes() -> dict[int, Process]:
    """The process table, zombies left out: they hold nothing and nothing can be done to them."""
    found = (read_process(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit())
    return {process.pid: process for process in found if process and process.state != "Z"}


def recorded_process(pid_file: Path) -> Process | None:
    """The process that a run's pid file names, if it is still that one; None when it is gone or a stranger has its number."""
    try:
        pid, start, init_start = pid_file.read_text().split()
        process, init = read_process(int(pid)), read_process(1)
    except (OSError, ValueError):
        return None
    if process is None or process.state == "Z" or process.start != start:
        return None
    return process if init_start == (init.start if init else UNKNOWN) else None


def is_marked(pid: int, launch_id: str) -> bool:
    """Whether the process carries the run's mark in its environment (setsid and a new parent do not take it away)."""
    if not launch_id:
        return False
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{MARK}={launch_id}".encode() in environment


def family(wrapper: Process | None, launch_id: str) -> list[Process]:
    """Every living process of a run: the marked ones, the wrapper's session, and all their descendants."""
    table = all_processes()
    members: set[int] = {pid for pid in table if is_marked(pid, launch_id)}
    if wrapper is not None:
        members |= {p.pid for p in table.values() if p.session == wrapper.pid} | {wrapper.pid}
    grown = True
    while grown:
        children = {p.pid for p in table.values() if p.ppid in members} - members
        members |= children
        grown = bool(children)
    return [table[pid] for pid in sorted(members) if pid in table]
