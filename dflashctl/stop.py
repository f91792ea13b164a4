"""Stop: the whole process tree of a run, then a look whether its GPUs are free again; one run, or those of several hosts."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dflashctl.errors import ContainerStoppedError, DflashctlError, StopIncompleteError
from dflashctl.gpus import Gpu, judge
from dflashctl.runs import History, RunRecord, record_of, who
from dflashctl.session import HostSession
from dflashctl.watch import list_runs, query_gpus, status

_MARGIN_S = 40.0
FREED_S = 15.0


def stop(
    session: HostSession, record: RunRecord, history: History, grace_s: float, ends_retries: bool = True
) -> dict[str, Any]:
    """TERM, grace, KILL over the whole tree, then a look whether its GPUs are free; raises StopIncompleteError.

    Where the run has ended already, nothing goes on from it by itself after this either, if `ends_retries`. `memory` in the
    answer is what the look came to, where it came to nothing: a sentence, or None.
    """
    request = {
        "root": session.host.root,
        "run": record.run,
        "launch_id": record.launch_id,
        "by": who(),
        "grace_s": grace_s,
        "ends_retries": ends_retries,
    }
    try:
        answer: dict[str, Any] = session.call("stop", "stop", request, timeout_s=grace_s + _MARGIN_S)
    except ContainerStoppedError:
        state, _ = status(session, record, history)
        return {"already": True, **state}
    state = answer["state"]
    history.remember(record, state)
    if answer["survivors"]:
        names = ", ".join(f"pid {p['pid']} ({p['name']}, state {p['state']})" for p in answer["survivors"])
        raise StopIncompleteError(
            f"{record.name}: still there after SIGKILL: {names}",
            hint="a process in state D waits for the driver: the host may need a reset",
            details={"run": record.run, "host": record.host, "survivors": answer["survivors"]},
        )
    if state["state"] in ("running", "starting"):
        raise StopIncompleteError(f"{record.name} is still {state['state']}", hint="try again in a moment")
    if state["state"] == "unknown":
        raise StopIncompleteError(f"whether {record.name} has ended is not known: its files may not be read by this user there")
    untouched = answer["already"] and not answer["leftovers"]
    memory = None if untouched else _await_freed(session, record, answer["gpus"])
    told = {name: answer[name] for name in ("already", "leftovers", "warning")} | {"memory": memory}
    return {"host": record.host, "tag": record.tag, **told, **state}


def _await_freed(session: HostSession, record: RunRecord, gpus: Sequence[Mapping[str, Any]]) -> str | None:
    """Wait until the GPUs of a stopped run hold nothing; raises StopIncompleteError when they go on holding it.

    A driver gives memory back some time after the last process is gone, and never where one is stuck in it. What is held by
    others is not looked at: by a run with a lease, by a process that is known and not of this run, or before it was launched.
    """
    deadline = time.monotonic() + FREED_S
    limits = {gpu.get("uuid"): session.host.idle.max_memory_mib + (gpu.get("memory_used_mib") or 0) for gpu in gpus}
    numbers = {gpu.get("uuid"): gpu.get("index") for gpu in gpus}
    while limits:
        try:
            found = query_gpus(session)
        except DflashctlError as error:
            return f"whether its GPUs are free is not known: {error}"
        if found.error:
            return f"whether its GPUs are free is not known: {found.error}"
        read = {gpu.uuid: gpu for gpu in found.gpus if gpu.uuid in limits and gpu.memory_used_mib is not None}
        if unread := [number for uuid, number in numbers.items() if uuid not in read]:
            names = ", ".join(f"GPU {number}" for number in unread)
            return f"whether its GPUs are free is not known: the memory of {names} cannot be read"
        held = [gpu for gpu in read.values() if _still_holds(gpu, record, limits[gpu.uuid])]
        if not held:
            break
        if time.monotonic() > deadline:
            each = "; ".join(f"GPU {gpu.index}: {judge(gpu, session.host.idle).reason}" for gpu in held)
            raise StopIncompleteError(
                f"{record.name} has ended, but its GPU memory is not given back: {each}",
                hint="a process that is stuck in the driver holds it: the host may need a reset",
                details={"run": record.run, "host": record.host, "survivors": [], "gpus": [gpu.index for gpu in held]},
            )
        time.sleep(1)
    return None


def _still_holds(gpu: Gpu, record: RunRecord, limit_mib: int) -> bool:
    strangers = bool(gpu.processes) and all(process.command and process.run != record.run for process in gpu.processes)
    return (gpu.memory_used_mib or 0) > limit_mib and not gpu.leases and not strangers


def stop_each(session: HostSession, records: Sequence[RunRecord], history: History, grace_s: float) -> list[dict[str, Any]]:
    """Stop several runs of one host, each of them tried; raises the worst error, with all of them in its sentence."""
    states, errors = [], []
    for record in records:
        try:
            states.append(stop(session, record, history, grace_s))
        except DflashctlError as error:
            errors.append(error)
    if errors:
        worst = max(errors, key=lambda error: error.exit_code)
        stopped = [f"{state['run']} is {state['state']}" for state in states]
        raise type(worst)("; ".join([*map(str, errors), *stopped]), hint=worst.hint, details={"runs": states})
    return states


def living_of_mine(session: HostSession) -> tuple[list[RunRecord], list[RunRecord]]:
    """The living runs of a host: those that this user launched from this machine, and those of others."""
    mine: list[RunRecord] = []
    others: list[RunRecord] = []
    for entry in list_runs(session):
        if entry["state"]["state"] in ("running", "starting"):
            of_mine = entry["record"].get("launched_by") == who()
            (mine if of_mine else others).append(record_of(entry, session.host.name, session.host.place))
    return mine, others
