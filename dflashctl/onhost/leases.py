"""Who holds which GPU: one file a GPU under root/leases, locked by the run that uses it.

The lock is the kernel's (flock), taken by run.sh and inherited by the trainer, so it is given back however they end, and no
file that is left behind can lie about it. The text in it says who holds it, for people; only the lock decides.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any, Iterator, NamedTuple

from dflashctl.onhost.entry import Fault
from dflashctl.onhost.layout import Layout, take_lock

_MOST_CHARACTERS = 1000
_TURN_S = 45.0


class Held(NamedTuple):
    """A lease that somebody holds."""

    number: int | None
    """nvidia-smi's index of the GPU."""
    uuid: str
    note: dict[str, Any]

    def sentence(self) -> str:
        """Who holds it, as far as it says."""
        note = {key: str(value) for key, value in self.note.items()}
        if "run" not in note:
            return f"GPU {self.number} is held by a run that its lease does not name"
        return f"GPU {self.number} is held by run {note['run']} of {note.get('by', 'somebody')} since {note.get('since', '?')}"


def path(layout: Layout, gpu: dict[str, Any]) -> Path:
    """The lease of one GPU {uuid, index}; a GPU without a uuid has one by its index."""
    name = gpu["uuid"] or f"index-{gpu['index']}"
    return layout.leases / re.sub(r"[^A-Za-z0-9-]", "_", name)


@contextlib.contextmanager
def turn(gpus: list[dict[str, Any]]) -> Iterator[None]:
    """Held from the look at the leases of `gpus` until they are taken, by one launch of the machine, whatever its root.

    The lock is on the machine's root directory, which everybody can open and nobody has to make.
    """
    if not gpus:
        yield
        return
    directory = os.open("/", os.O_RDONLY)
    try:
        take_lock(directory, _TURN_S, "another launch on this machine is taking GPUs; try again")
        yield
    finally:
        os.close(directory)


def held(layout: Layout, gpus: list[dict[str, Any]]) -> list[Held]:
    """Those of `gpus` whose lease is locked, here or under another root of this machine, with what it says."""
    layout.leases.mkdir(parents=True, exist_ok=True)
    elsewhere = _elsewhere({path(layout, gpu).name for gpu in gpus if gpu["uuid"]})
    found = []
    for gpu in gpus:
        lease = path(layout, gpu)
        holder = lease if is_locked(lease) else elsewhere.get(lease.name)
        if holder:
            found.append(Held(gpu["index"], gpu["uuid"], note(holder)))
    return found


def _elsewhere(names: set[str]) -> dict[str, Path]:
    """Locked leases of these names that a process of any root has open; those of other users are seen by root alone."""
    found: dict[str, Path] = {}
    for link in _open_files() if names else ():
        with contextlib.suppress(OSError):
            target = Path(os.readlink(link))
            if target.name in names and target.parent.name == "leases" and is_locked(link, "rb"):
                found[target.name] = link
    return found


def _open_files() -> Iterator[Path]:
    """What processes have open, as far as we may see it; any of them may end meanwhile, which `glob` does not bear."""
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            yield from [Path(f"/proc/{process}/fd/{descriptor}") for descriptor in os.listdir(f"/proc/{process}/fd")]


def is_locked(lease: Path, mode: str = "a") -> bool:
    """Whether a run holds it. A look takes a shared lock, so that two who look do not take each other for a run."""
    with open(lease, mode) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True


def note(lease: Path) -> dict[str, Any]:
    """What a lease says: run, by, since; empty where it cannot be read."""
    try:
        with open(lease, errors="replace") as file:
            found = json.loads(file.read(_MOST_CHARACTERS))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def refusal(taken: list[Held]) -> Fault:
    """Busy, and who holds what."""
    sentence = "; ".join(lease.sentence() for lease in taken)
    hint = "'--wait-gpu' waits for it; '--gpus' chooses others; '--force' starts in spite of it"
    return Fault("gpu_busy", sentence, hint, taken=[lease.uuid for lease in taken])
