"""Look without touching the host: a run's state, its log as it grows until it has ended, and a host's GPUs.

What a look learns of a run's state stays in this machine's history.
"""

import base64
import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dflashctl.errors import ContainerError, ContainerStoppedError, DflashctlError, ExitCode, HostError, RemoteTimeoutError
from dflashctl.gpus import GpuReport, joined, judge
from dflashctl.runs import History, RunRecord
from dflashctl.session import HostSession, patiently
from dflashctl.smi import parse_query, query_script

RECONNECT_S = 120.0
_WAIT_S = 10.0
_PAUSE_S = 0.3
_GPU_QUERY_S = 90.0
BEGIN: dict[str, Any] = {"offset": 0, "seen": hashlib.sha256().hexdigest()}
"""The place where a log begins."""

_ENDED = frozenset({"exited", "killed", "stopped", "lost"})


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one look at a run saw; `data` is raw log, `place` where the next look begins."""

    state: dict[str, Any]
    data: bytes
    place: dict[str, Any]
    log: str
    left: int
    """Bytes that the log already has beyond `data`."""
    restarted: bool
    """The log was cut off or replaced, and `data` is its beginning."""

    @property
    def is_last(self) -> bool:
        """The run has ended and nothing of its log is left."""
        return not self.data and self.state["state"] in _ENDED


def look(
    session: HostSession, record: RunRecord, history: History, place: dict[str, Any] | None, lines: int = 0, wait_s: float = 0
) -> Chunk:
    """State and log from `place`, or from the last `lines` lines where it is None; waits up to `wait_s` for news."""
    request = {
        "root": session.host.root,
        "run": record.run,
        "launch_id": record.launch_id,
        "place": place,
        "lines": lines,
        "wait_s": wait_s,
    }
    answer = session.call("logs", "peek", request, timeout_s=wait_s + 30)
    chunk = Chunk(**answer | {"data": base64.b64decode(answer["data"])})
    history.remember(record, chunk.state)
    return chunk


def follow(
    session: HostSession,
    record: RunRecord,
    history: History,
    emit: Callable[[bytes], None],
    note: Callable[[str], None],
    place: dict[str, Any] | None = None,
    lines: int = 10,
    patience_s: float = RECONNECT_S,
) -> dict[str, Any]:
    """Emit the log as it grows; returns the state once the run has ended and everything it wrote was emitted.

    Looking changes nothing, so a lost link is opened again and the log goes on where it stopped; `note` is told of that, and of
    a log that begins again. `emit` also gets the nothing that a silent run wrote. Raises HostError when the host stays away for
    longer than `patience_s`.
    """
    while True:
        chunk = _look_again(session, record, history, place, lines, note, patience_s)
        if chunk.restarted:
            note(f"the log of {record.name} was cut off or replaced; it goes on from its start")
        if chunk.is_last:
            return chunk.state
        emit(chunk.data)
        place = chunk.place
        time.sleep(_PAUSE_S if chunk.data and not chunk.left else 0)  # a chatty run is read in larger pieces


def _look_again(
    session: HostSession,
    record: RunRecord,
    history: History,
    place: dict[str, Any] | None,
    lines: int,
    note: Callable[[str], None],
    patience_s: float,
) -> Chunk:
    def ask() -> Chunk:
        try:
            return look(session, record, history, place, lines, _WAIT_S)
        except ContainerStoppedError as error:
            note(str(error))
            return Chunk(_lost(record, history, error), b"", place or BEGIN, "", 0, restarted=False)

    return patiently(session, ask, 0 if place is None else patience_s, note)  # a host that never answered is not a lost link


def show(
    session: HostSession, record: RunRecord, history: History, emit: Callable[[bytes], None], lines: int
) -> dict[str, Any]:
    """Emit the last lines as the log has them now, and not all that a living run adds meanwhile; returns the state."""
    chunk = look(session, record, history, None, lines)
    emit(chunk.data)
    end = chunk.place["offset"] + chunk.left
    while chunk.data and not chunk.restarted and chunk.place["offset"] < end:
        chunk = look(session, record, history, chunk.place)
        emit(chunk.data)
    return {**chunk.state, "log": chunk.log}


def status(session: HostSession, record: RunRecord, history: History) -> tuple[dict[str, Any], ExitCode]:
    """What became of a run. A host that cannot be asked makes it `unknown`, a stopped container `lost`, with the reason."""
    try:
        state = look(session, record, history, None).state
    except ContainerStoppedError as error:
        return _lost(record, history, error), ExitCode.OK
    except (HostError, ContainerError, RemoteTimeoutError) as error:
        return _without_host(record, "unknown", error), error.exit_code
    return {"host": record.host, "tag": record.tag, **state}, ExitCode.OK


def lives(session: HostSession, record: RunRecord, history: History) -> bool:
    """Whether a run has not ended yet, as far as its host can be asked."""
    return status(session, record, history)[0]["state"] in ("starting", "running")


def _lost(record: RunRecord, history: History, error: ContainerStoppedError) -> dict[str, Any]:
    """Whatever ran in a container that is stopped is gone."""
    state = _without_host(record, "lost", error)
    history.remember(record, state)
    return state


def _without_host(record: RunRecord, state: str, error: DflashctlError) -> dict[str, Any]:
    ending = ("exit_code", "signal", "oom_kills", "started_at", "ended_at", "duration_s")
    names = (*ending, "pid", "progress", "step", "last_event", "last_event_age_s", "stalled")
    known = {"run": record.run, "host": record.host, "tag": record.tag, "state": state, "error": str(error)}
    return dict.fromkeys(names) | known


def list_runs(session: HostSession) -> list[dict[str, Any]]:
    """Every run that the host knows: {record, state}."""
    found: list[dict[str, Any]] = session.call("runs", "list", {"root": session.host.root})["runs"]
    return found


def living(session: HostSession, history: History) -> list[dict[str, Any]]:
    """The states of the runs that live on a host, each with who launched it."""
    name, known = session.host.name, {record.launch_id: record for record in history.records()}
    found = list_runs(session)
    for run in found:
        if record := known.get(run["record"]["launch_id"]):
            history.remember(record, run["state"])
    return [
        {"host": name, "tag": run["record"]["tag"], "launched_by": run["record"].get("launched_by"), **run["state"]}
        for run in found
        if run["state"]["state"] not in _ENDED
    ]


def survey(session: HostSession) -> tuple[dict[str, Any], ExitCode]:
    """Every GPU of a host with its verdict, for --json, and the exit code that goes with it.

    A host that cannot be asked, and GPUs that cannot be read, are an `error` in the document; nothing is raised.
    """
    document: dict[str, Any] = {"host": session.host.name, "error": None, "note": None, "gpus": []}
    try:
        report = query_gpus(session)
    except DflashctlError as error:
        return document | {"error": str(error)}, error.exit_code
    rows = [asdict(gpu) | asdict(judge(gpu, session.host.idle)) for gpu in report.gpus]
    names = ("index", "uuid", "name", "memory_used_mib", "memory_total_mib", "utilization_percent", "temperature_c")
    shown = (*names, "power_w", "state", "reason", "processes", "leases")
    document |= {
        "error": report.error,
        "note": report.note or _doubt(report),
        "gpus": [{key: row[key] for key in shown} for row in rows],
    }
    return document, ExitCode.GPU_UNKNOWN if report.error else ExitCode.OK


def _doubt(report: GpuReport) -> str | None:
    return f"who is at them from other containers is not known: {report.doubt}" if report.doubt else None


def query_gpus(session: HostSession) -> GpuReport:
    """Ask the host's nvidia-smi and, around a container, the machine that it is on; raises what the session raises."""
    done = session.script(query_script(session.host.root), timeout_s=_GPU_QUERY_S)
    report = parse_query(done.stdout.decode(errors="replace"))
    if session.host.container is None or not report.gpus:
        return report
    try:
        done = session.script(query_script(None), timeout_s=_GPU_QUERY_S, outside=True)
        around = parse_query(done.stdout.decode(errors="replace"))
    except DflashctlError as error:  # memory in use is seen inside as well, only not whose it is
        around = GpuReport(error=str(error))
    return joined(report, around, session.host.container.id)
