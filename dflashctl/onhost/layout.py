"""Where everything lies under a host's root. One class owns every path, so that no other file composes one.

root/current -> releases/<digest>     root/train_<tag>.log -> runs/<tag>-<n>/train.log
root/releases/<digest>/trainer/...    root/caches/<key>/{inductor,triton}   (--warm-cache)
root/runs/<tag>-<n>/{run.json,config.json,run.sh,secrets.sh,train.log,events.jsonl,pid,times,exit_code,stopped,no_retries,
                                      cache/}
root/leases/<gpu uuid>                locked by the run that uses the GPU (leases.py)
root/venv -> venvs/<digest>           the trainer's environment, where setup made one
root/withdrawn/<launch id>            a launch that was given up before it had claimed a run, and must not claim one later
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import Any, Iterator

from dflashctl.onhost.entry import Fault

_MARK = re.compile(r"DFLASHCTL_LAUNCH_ID=([0-9a-f]+)")
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]*-([1-9][0-9]*)")
_WITHDRAWN_KEPT_S = 86400.0


class Layout:
    """Every path under one root."""

    def __init__(self, root: str) -> None:
        """`root` is absolute; nothing is created here."""
        self.root = Path(root)
        self.releases = self.root / "releases"
        self.runs = self.root / "runs"
        self.caches = self.root / "caches"
        self.current = self.root / "current"
        self.leases = self.root / "leases"
        self._withdrawn = self.root / "withdrawn"

    def release(self, digest: str) -> Path:
        """Folder of one release."""
        return self.releases / digest

    def log_link(self, tag: str) -> Path:
        """The name that old habits know."""
        return self.root / f"train_{tag}.log"

    def current_release(self) -> str | None:
        """Digest that `current` points to, or None."""
        try:
            return Path(os.readlink(self.current)).name
        except OSError:
            return None

    def find_run(self, run: str, launch_id: str | None = None) -> RunFolder:
        """The folder of a run; raises Fault run_not_found, also when its launch is not the one that was meant."""
        folder = RunFolder(self.runs / run)
        if not _RUN_ID.fullmatch(run) or not folder.path.is_dir():
            raise Fault("run_not_found", f"no run {run} under {self.root}")
        if launch_id and folder.launch_id() not in ("", launch_id):
            raise Fault("run_not_found", f"run {run} under {self.root} is another one now, of another launch")
        return folder

    def all_runs(self) -> list[RunFolder]:
        """Every run that was claimed here; raises OSError where they cannot be listed, which is not the same as none."""
        try:
            names = sorted(os.listdir(self.runs))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [RunFolder(self.runs / name) for name in names if _RUN_ID.fullmatch(name)]

    def withdraw(self, launch_id: str) -> None:
        """Write down that this launch may start nothing any more; to be called with the lock held."""
        self._withdrawn.mkdir(exist_ok=True)
        (self._withdrawn / launch_id).touch()

    def refuse_withdrawn(self, launch_id: str) -> None:
        """Raise Fault where the launch was withdrawn, so that what was called "nothing started" stays true."""
        if (self._withdrawn / launch_id).exists():
            raise Fault("environment", "this launch was given up when its link broke, and starts nothing")
        for old in self._withdrawn.glob("*"):
            if time.time() - modified(old) > _WITHDRAWN_KEPT_S:
                with contextlib.suppress(OSError):
                    old.unlink()

    def claim_run(self, tag: str) -> RunFolder:
        """Make the folder of the next run of `tag`; mkdir decides between two who ask at once.

        A number is never given twice, even when somebody has deleted the run that had it: another laptop may remember that one.
        """
        self.runs.mkdir(parents=True, exist_ok=True)
        last = self.runs / f".last-{tag}"
        numbers = [int(path.name[len(tag) + 1 :]) for path in self.runs.glob(f"{tag}-*") if path.name[len(tag) + 1 :].isdigit()]
        with contextlib.suppress(OSError, ValueError):
            numbers.append(int(last.read_text()))
        number = 1 + max(numbers, default=0)
        while True:
            claimed = self.runs / f"{tag}-{number}"
            with contextlib.suppress(FileExistsError):
                claimed.mkdir()
                try:
                    write_text(last, f"{number}\n")
                except OSError:
                    claimed.rmdir()
                    raise
                return RunFolder(claimed)
            number += 1

    @contextlib.contextmanager
    def lock(self, timeout_s: float = 20.0) -> Iterator[None]:
        """Held while releases are swapped or pruned and runs are claimed, so that neither pulls the other's floor away."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / ".lock", "a") as file:
            take_lock(file.fileno(), timeout_s, f"{self.root}/.lock is held by another dflashctl")
            yield


class RunFolder:
    """Every path of one run."""

    def __init__(self, path: Path) -> None:
        """`path` is root/runs/<tag>-<n>."""
        self.path = path
        self.run = path.name
        self.record_path = path / "run.json"
        self.config = path / "config.json"
        self.script = path / "run.sh"
        self.log = path / "train.log"
        self.events = path / "events.jsonl"
        self.pid = path / "pid"
        self.exit_code = path / "exit_code"
        self.stopped = path / "stopped"
        self.no_retries = path / "no_retries"
        self.times = path / "times"
        self.secrets = path / "secrets.sh"
        self.cache = path / "cache"
        self.checkpoints = path / "checkpoints"

    def record(self) -> dict[str, Any]:
        """run.json, or an empty mapping where it cannot be read."""
        try:
            record = json.loads(self.record_path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def launch_id(self) -> str:
        """The mark of the run's processes: from its record, else from its script; empty where neither tells."""
        from_record = self.record().get("launch_id")
        if isinstance(from_record, str):
            return from_record
        try:
            found = _MARK.search(self.script.read_text())
        except (OSError, ValueError):
            return ""
        return found.group(1) if found else ""


def modified(path: Path) -> float:
    """When it was last written; now, if somebody has removed it since it was listed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def take_lock(descriptor: int, timeout_s: float, refusal: str) -> None:
    """Lock an open file or folder until it is closed; raises Fault with `refusal` where another holds it for all that time."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Fault("timeout", refusal) from None
            time.sleep(0.02)


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name, then rename: a reader never sees half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # of two who write, each has its own
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def point_link(link: Path, target: str) -> None:
    """Swap a symlink atomically."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    os.symlink(target, temporary)
    os.replace(temporary, link)
