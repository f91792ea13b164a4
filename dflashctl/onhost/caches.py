"""Compile caches: a run's own, one shared by runs of one kind, and the host's default one.

Stale caches give wrong code and clearing one under a live run breaks that run (pytorch#136883, sglang#34231): so a run has a
cache of its own unless it asks for the warm one, and nothing is emptied while anybody lives in it.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
from pathlib import Path

from dflashctl.onhost.entry import Fault
from dflashctl.onhost.layout import Layout, RunFolder
from dflashctl.onhost.processes import all_processes
from dflashctl.onhost.states import MAY_LIVE, state_of

_PREFIX = "torchinductor_"
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_BORN = ".born"


def warm_cache(layout: Layout, release: str, torch: str, gpu_model: str) -> Path:
    """The cache shared by runs of one release, torch and GPU model; emptied if a run died in it before its gate opened."""
    key = re.sub(r"[^A-Za-z0-9.+-]+", "_", f"{release}-{torch}-{gpu_model}")
    cache = layout.caches / key
    users = [folder for folder in layout.all_runs() if folder.record().get("cache") == str(cache)]
    dead = [folder for folder in users if state_of(folder)["state"] not in MAY_LIVE]
    suspects = [f for f in dead if _born(cache) <= f.record_path.stat().st_mtime and not _gate_opened(f)]
    if suspects and len(dead) == len(users):
        shutil.rmtree(cache, ignore_errors=True)
    if not cache.exists():
        cache.mkdir(parents=True)
        (cache / _BORN).touch()
    return cache


def _born(cache: Path) -> float:
    """When a warm cache was made, by a file in it that nobody writes again; 0 where there is none."""
    try:
        return (cache / _BORN).stat().st_mtime
    except OSError:
        return 0.0


def _gate_opened(folder: RunFolder) -> bool:
    try:
        with open(folder.events, "rb") as file:
            return any(b'"gate_open"' in line for line in file)
    except OSError:
        return False


def clear_default_cache(environment: dict[str, str]) -> Path:
    """Empty the inductor cache that a process of this user and `environment` uses by default.

    Raises Fault when it is a symlink, is not recognisably such a cache, or a living process may be using it.
    """
    cache = _default_cache(environment)
    if not cache.is_absolute() or cache.resolve() != cache:
        raise Fault(
            "environment", f"{cache} is reached through a symlink or is not absolute; it is left alone", "clear it by hand"
        )
    if not cache.name.startswith(_PREFIX):
        raise Fault("environment", f"{cache} is not named {_PREFIX}*; it is left alone", "clear it by hand")
    users = _living_users(cache)
    if users:
        names = ", ".join(users)
        raise Fault("environment", f"{cache} is in use by {names}; it is left alone", "wait, or launch without --clear-cache")
    if cache.exists():
        shutil.rmtree(cache)
    return cache


def _default_cache(environment: dict[str, str]) -> Path:
    explicit = environment.get(_VARIABLE)
    if explicit:
        return Path(explicit)
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    folder = next((environment[name] for name in ("TMPDIR", "TEMP", "TMP") if environment.get(name)), "/tmp")
    return Path(folder) / f"{_PREFIX}{user}"


def _living_users(cache: Path) -> list[str]:
    """Processes that have something of the cache mapped, or run torch with this cache as their own."""
    return [
        f"pid {process.pid} ({process.name})"
        for process in all_processes().values()
        if process.pid != os.getpid() and _lives_in(process.pid, cache)
    ]


def _lives_in(pid: int, cache: Path) -> bool:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # another user's process: its default cache is named after that user
    if f"{cache}/" in maps:
        return True
    own = dict(pair.decode(errors="replace").partition("=")[::2] for pair in pairs if b"=" in pair)
    return "libtorch" in maps and _default_cache(own) == cache
