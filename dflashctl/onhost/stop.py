"""Stop a run: TERM to the whole tree, grace, KILL, then look again."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

from dflashctl.onhost.entry import Fault, explain
from dflashctl.onhost.layout import Layout, RunFolder, write_text
from dflashctl.onhost.processes import Process, family, read_process, recorded_process
from dflashctl.onhost.states import MAY_LIVE, state_of

_KILL_S = 5.0


def stop(args: dict[str, Any]) -> dict[str, Any]:
    """Stop `run`; answers `already` (it had ended), `leftovers` (how many processes it still had then), state, GPUs, `warning`.

    Of one that has ended `ends_retries` says that nothing is to go on from it by itself either.
    `survivors` [{pid, name, state}] are those that nothing could end.
    """
    layout = Layout(args["root"])
    folder = layout.find_run(args["run"], args["launch_id"])
    already = state_of(folder)["state"] not in MAY_LIVE
    warning = None
    try:
        if not already:
            _mark(folder.stopped, args["by"])  # also keeps one that is starting from going on
        elif args["ends_retries"]:
            with layout.lock():  # a retry that is being launched comes before or after
                _mark(folder.no_retries, args["by"])
    except OSError as error:  # a run that has filled the disk is ended all the same
        warning = f"that it was stopped could not be written down: {explain(error, args['root'])}"
    tree = _Tree(folder)
    leftovers = len(tree.living()) if already else 0
    tree.signal(signal.SIGTERM)
    if not tree.gone(args["grace_s"]):
        # without children the wrapper has nothing left to wait for: it writes the exit code and goes
        tree.signal(signal.SIGKILL, spare=tree.wrapper)
        if not tree.gone(_KILL_S):
            tree.signal(signal.SIGKILL)
            tree.gone(_KILL_S)
    if not folder.launch_id():
        raise Fault(
            "stop_incomplete", f"{folder.run}: run.json and run.sh cannot be read, so its children cannot be told apart"
        )
    survivors = [{"pid": p.pid, "name": p.name, "state": p.state} for p in tree.living()]
    gpus = folder.record().get("gpus", [])
    told = {"already": already, "leftovers": leftovers, "survivors": survivors, "warning": warning}
    return {**told, "state": state_of(folder), "gpus": gpus}


def _mark(path: Path, by: str) -> None:
    """Write who stopped it; an empty file, which needs no block, where the disk is full."""
    try:
        write_text(path, f"{by}\n")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        path.touch()


class _Tree:
    """The processes of a run. Who was once seen in it stays in it: a dying parent takes the tie to its children along."""

    def __init__(self, folder: RunFolder) -> None:
        self._launch_id = folder.launch_id()
        self._seen: dict[int, str] = {}
        self.wrapper = recorded_process(folder.pid)

    def living(self) -> list[Process]:
        wrapper = self.wrapper if self.wrapper and _is_same(self.wrapper.pid, self.wrapper.start) else None
        self._seen.update((process.pid, process.start) for process in family(wrapper, self._launch_id))
        found = (read_process(pid) for pid, start in self._seen.items() if _is_same(pid, start))
        return [process for process in found if process]

    def signal(self, number: signal.Signals, spare: Process | None = None) -> None:
        for process in self.living():
            if process.pid > 1 and not (spare and process.pid == spare.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):  # who stays is a survivor
                    os.kill(process.pid, number)

    def gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.living():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _is_same(pid: int, start: str) -> bool:
    process = read_process(pid)
    return process is not None and process.start == start and process.state != "Z"


VERBS = {"stop": stop}
