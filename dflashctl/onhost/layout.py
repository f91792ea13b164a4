"""Where everything lies under a host's root. One class owns every path, so that no other file composes one.

root/current -> releases/<digest>     root/train_<tag>.log -> runs/<tag>-<n>/train.log
root/releases/<digest>/trainer/...    root/caches/<key>/{inductor,triton}   (--warm-cache)
root/runs/<tag>-<n>/{run.json,config.json,run.sh,train.log,events.jsonl,pid,exit_code,stopped,cache/}
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

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]*-([1-9][0-9]*)")


class Layout:
    """Every path under one root."""

    def __init__(self, root: str) -> None:
        """`root` is absolute; nothing is created here."""
        self.root = Path(root)
        self.releases = self.root / "releases"
        self.runs = self.root / "runs"
        self.caches = self.root / "caches"
        self.current = self.root / "current"

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

    def find_run(self, run: str) -> RunFolder:
        """The folder of a run; raises Fault run_not_found."""
        folder = RunFolder(self.runs / run)
        if not _RUN_ID.fullmatch(run) or not folder.record_path.is_file():
            raise Fault("run_not_found", f"no run {run} under {self.root}")
        return folder

    def all_runs(self) -> list[RunFolder]:
        """Every run whose record can be read."""
        folders = (RunFolder(path) for path in sorted(self.runs.glob("*")) if _RUN_ID.fullmatch(path.name))
        return [folder for folder in folders if folder.record()]

    def claim_run(self, tag: str) -> RunFolder:
        """Make the folder of the next run of `tag`; mkdir decides between two who ask at once."""
        self.runs.mkdir(parents=True, exist_ok=True)
        taken = [int(match.group(1)) for match in map(_RUN_ID.fullmatch, os.listdir(self.runs)) if match]
        number = 1 + max((n for n in taken if (self.runs / f"{tag}-{n}").exists()), default=0)
        while True:
            with contextlib.suppress(FileExistsError):
                (self.runs / f"{tag}-{number}").mkdir()
                return RunFolder(self.runs / f"{tag}-{number}")
            number += 1

    @contextlib.contextmanager
    def lock(self, timeout_s: float = 20.0) -> Iterator[None]:
        """Held while releases are swapped or pruned and runs are claimed, so that neither pulls the other's floor away."""
        self.root.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + timeout_s
        with open(self.root / ".lock", "a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise Fault("timeout", f"{self.root}/.lock is held by another dflashctl") from None
                    time.sleep(0.02)
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
        self.cache = path / "cache"

    def record(self) -> dict[str, Any]:
        """run.json, or an empty mapping where it cannot be read."""
        try:
            record = json.loads(self.record_path.read_text())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name, then rename: a reader never sees half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def point_link(link: Path, target: str) -> None:
    """Swap a symlink atomically."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    os.symlink(target, temporary)
    os.replace(temporary, link)
