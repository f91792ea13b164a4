"""Launch and stop: the verbs that change something on a host, in the order that keeps other people's work safe."""

import datetime
import getpass
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflashctl import placement
from dflashctl.bundle import Deployment, deploy, pack
from dflashctl.errors import EnvironmentFault, StartupDeath, StopIncompleteError
from dflashctl.experiment import Experiment
from dflashctl.gpus import Gpu
from dflashctl.runs import History, RunRecord
from dflashctl.session import HostSession
from dflashctl.watch import query_gpus

_STOP_MARGIN_S = 40.0
_LOG_LINES = 20
_LAUNCH_MARGIN_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to launch, apart from what the experiment says."""

    gpus: tuple[int, ...] | None = None
    no_deploy: bool = False
    warm_cache: bool = False
    clear_cache: bool = False
    startup_seconds: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A run that is under way, or has already ended well."""

    run: str
    tag: str
    host: str
    pid: int | None
    log: str
    run_dir: str
    state: str
    exit_code: int | None
    gpus: tuple[Gpu, ...]
    release: str
    warning: str | None
    cleared_cache: str | None
    watched_s: float
    lines: list[str]
    offset: int

    def document(self) -> dict[str, Any]:
        """For --json."""
        names = (
            "run",
            "tag",
            "host",
            "pid",
            "log",
            "run_dir",
            "state",
            "exit_code",
            "release",
            "warning",
            "cleared_cache",
            "watched_s",
        )
        return {name: getattr(self, name) for name in names} | {"gpus": _named(self.gpus)}


def launch(
    session: HostSession,
    experiment: Experiment,
    options: Options,
    environ: Mapping[str, str],
    history: History,
    report: Callable[[str, object], None],
) -> Launched:
    """Deploy if stale, check GPUs, start detached, watch the start-up window.

    `report(what, value)` is told of each step as it ends ("deployed", "gpus"). Raises GpuBusyError, GpuUnknownError,
    EnvironmentFault and StartupDeath; every one of them leaves what is on the host as it was, apart from a new release.
    """
    release = _release(session, options, environ, report)
    chosen = _gpus(session, experiment, options)
    report("gpus", chosen)
    record = RunRecord(
        launch_id=secrets.token_hex(8),
        host=session.host.name,
        tag=experiment.tag,
        created_at=_now(),
        release=release,
        hypothesis=experiment.hypothesis,
    )
    history.append(record)  # before anything is sent: a lost link then leaves something to look for
    request = _request(session, experiment, options, record, chosen)
    try:
        answer = session.call("runs", "launch", request, timeout_s=options.startup_seconds + _LAUNCH_MARGIN_S)
    except EnvironmentFault:
        history.append(replace(record, state="refused"))
        raise
    history.append(replace(record, run=answer["run"], state=answer["state"], exit_code=answer["exit_code"]))
    launched = _launched(session, experiment, record, chosen, answer)
    if answer["state"] not in ("running", "starting") and answer["exit_code"] != 0:
        raise _death(launched)
    return launched


def _release(session: HostSession, options: Options, environ: Mapping[str, str], report: Callable[[str, object], None]) -> str:
    bundle = pack(environ)
    deployment: Deployment = deploy(session, bundle, dry_run=options.no_deploy)
    if not options.no_deploy:
        report("deployed", deployment)
        return deployment.release
    if deployment.previous is None:
        raise EnvironmentFault(
            f"host {session.host.name} has no release to launch", hint=f"dflashctl deploy {session.host.name}"
        )
    return deployment.previous


def _gpus(session: HostSession, experiment: Experiment, options: Options) -> tuple[Gpu, ...]:
    if not experiment.config.uses_cuda:
        return ()
    wanted = options.gpus if options.gpus is not None else experiment.gpus
    return placement.choose(query_gpus(session), session.host, wanted, experiment.config.num_gpus)


def _request(
    session: HostSession, experiment: Experiment, options: Options, record: RunRecord, chosen: Sequence[Gpu]
) -> dict[str, Any]:
    host = session.host
    config = experiment.config.to_dict()
    config["run"]["root"] = host.root
    return {
        "root": host.root,
        "tag": experiment.tag,
        "launch_id": record.launch_id,
        "release": record.release,
        "python": host.python,
        "env": {**host.env, **placement.visible_devices(chosen)},
        "config": config,
        "cache": "warm" if options.warm_cache else "own",
        "gpu_model": chosen[0].name if chosen and chosen[0].name else "cpu",
        "clear_cache": options.clear_cache,
        "startup_s": options.startup_seconds,
        "log_lines": _LOG_LINES,
        "record": {
            "schema": 1,
            "host": host.name,
            "python": host.python,
            "gpus": _named(chosen),
            "hypothesis": experiment.hypothesis,
            "parent": experiment.parent,
            "change": experiment.change,
            "expect": list(experiment.expect),
            "origins": dict(experiment.origins),
            "launched_by": _who(),
        },
    }


def _launched(
    session: HostSession, experiment: Experiment, record: RunRecord, chosen: tuple[Gpu, ...], answer: dict[str, Any]
) -> Launched:
    return Launched(
        tag=experiment.tag,
        host=session.host.name,
        gpus=chosen,
        release=record.release or "",
        **{
            name: answer[name]
            for name in (
                "run",
                "pid",
                "log",
                "run_dir",
                "state",
                "exit_code",
                "warning",
                "cleared_cache",
                "watched_s",
                "lines",
                "offset",
            )
        },
    )


def _death(launched: Launched) -> StartupDeath:
    how = f"exit code {launched.exit_code}" if launched.exit_code is not None else "no exit code"
    if launched.exit_code is not None and launched.exit_code > 128:
        how = f"signal {launched.exit_code - 128}"
    text = "\n".join(launched.lines) or "(the log is empty)"
    return StartupDeath(
        f"{launched.run} died within {launched.watched_s:.0f} s of its start ({launched.state}, {how}); its log ends:\n{text}",
        hint=f"the whole log: dflashctl tail {launched.run} --no-follow",
        details=launched.document() | {"lines": launched.lines},
    )


def stop(session: HostSession, record: RunRecord, history: History, grace_s: float) -> dict[str, Any]:
    """TERM, grace, KILL over the whole tree; raises StopIncompleteError naming what survived."""
    request = {"root": session.host.root, "run": record.run, "by": _who(), "grace_s": grace_s}
    answer: dict[str, Any] = session.call("stop", "stop", request, timeout_s=grace_s + _STOP_MARGIN_S)
    state = answer["state"]
    if answer["survivors"]:
        names = ", ".join(f"pid {p['pid']} ({p['name']}, state {p['state']})" for p in answer["survivors"])
        raise StopIncompleteError(
            f"{record.name}: still there after SIGKILL: {names}",
            hint="a process in state D waits for the driver: the host may need a reset",
            details={"run": record.run, "host": record.host, "survivors": answer["survivors"]},
        )
    if state["state"] != record.state:
        history.append(replace(record, state=state["state"], exit_code=state["exit_code"]))
    return {"host": record.host, "tag": record.tag, "already": answer["already"], **state}


def _named(gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    return [{"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name} for gpu in gpus]


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return f"unknown@{socket.gethostname()}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
