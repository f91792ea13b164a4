"""Launch: deploy, check, start, watch, in the order that keeps other people's work safe."""

import datetime
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dflashctl import placement
from dflashctl.bundle import deploy, pack
from dflashctl.errors import (
    BrokenAnswerError,
    ConfigurationError,
    DflashctlError,
    EnvironmentFault,
    GpuBusyError,
    GpuUnknownError,
    HostError,
    InterruptedByUser,
    RemoteTimeoutError,
    StartupDeath,
)
from dflashctl.experiment import Experiment
from dflashctl.gpus import Gpu, GpuReport
from dflashctl.programs import LOG_LINES, TRAINER, Program
from dflashctl.runs import History, RunRecord, who
from dflashctl.session import HostSession, patiently
from dflashctl.watch import RECONNECT_S, query_gpus

_LAUNCH_MARGIN_S = 60.0
_FIND_S = 45.0
WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to launch, apart from what the experiment says."""

    gpus: tuple[int, ...] | None = None
    program: Program = TRAINER
    resume: RunRecord | None = None
    """Go on from its newest checkpoint."""
    retries: RunRecord | None = None
    """The run whose death this launch is the answer to; refused where somebody has stopped it or it has a successor."""
    release: str | None = None
    """One that is on the host already, of an earlier run. None: the newest, deployed if need be."""
    no_deploy: bool = False
    warm_cache: bool = False
    clear_cache: bool = False
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Environment whose values are nowhere shown or written down, but on the host for the run itself."""
    startup_seconds: float = 5.0
    wait_gpu_s: float = 0.0
    """How long to wait for busy GPUs; infinity is as long as it takes."""
    force: bool = False
    """Take GPUs that are busy, held by a run, or unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A run that is under way, or has already ended."""

    record: RunRecord
    run: str
    tag: str
    host: str
    pid: int | None
    log: str
    run_dir: str
    state: str
    exit_code: int | None
    oom_kills: int | None
    gpus: tuple[Gpu, ...]
    release: str
    warning: str | None
    cleared_cache: str | None
    watched_s: float
    lines: list[str]
    overridden: list[str]
    """What `force` has overridden."""

    def death(self, program: Program = TRAINER) -> StartupDeath | None:
        """What there is to say where it has ended badly already, and what it ran does not answer by its end."""
        died = self.state not in ("running", "starting") and self.exit_code != 0
        return _death(self) if died and not program.answers else None

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
            "oom_kills",
            "release",
            "warning",
            "cleared_cache",
            "watched_s",
            "overridden",
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

    `report(what, value)` is told of each step ("deployed", "gpus", "doubt", "waiting"). Raises GpuBusyError, GpuUnknownError,
    EnvironmentFault, RetryRefused and InterruptedByUser; a refusal changes nothing on the host but its release.
    """
    if options.resume and "run.resume" in experiment.origins:
        raise ConfigurationError("run.resume is set by --resume; take it out of the experiment and of --set")
    if "run.root" in experiment.origins:
        raise ConfigurationError("run.root is the host's root and set by launch; take it out of the experiment and of --set")
    record = RunRecord(
        launch_id=secrets.token_hex(8),
        host=session.host.name,
        place=session.host.place,
        tag=f"{experiment.tag}{options.program.suffix}",
        created_at=_now(),
        hypothesis=experiment.hypothesis,
        resumes=options.resume.run if options.resume else None,
    )
    history.append(record)  # before anything is sent: a lost link then leaves something to look for
    record = replace(record, release=_release(session, options, environ, report))
    try:
        chosen, answer = _start(session, experiment, options, record, report)
    except (KeyboardInterrupt, HostError, RemoteTimeoutError, BrokenAnswerError) as error:
        chosen, answer = _adopt(session, record, history, error)
    record = replace(record, run=answer["run"], state=answer["state"], exit_code=answer["exit_code"])
    try:
        history.append(record)
    except EnvironmentFault as error:  # the run goes on; to fail now would hide its name
        answer["warning"] = "; ".join(filter(None, [answer["warning"], str(error)]))
    return _launched(record, chosen, answer)


def _release(session: HostSession, options: Options, environ: Mapping[str, str], report: Callable[[str, object], None]) -> str:
    if options.release is not None:
        return options.release
    if options.no_deploy:
        active: str | None = session.call("releases", "current", {"root": session.host.root})["release"]
        if active is None:
            name = session.host.name
            raise EnvironmentFault(f"host {name} has no release to launch", hint=f"dflashctl deploy {name}")
        return active
    deployment = deploy(session, pack(environ))
    report("deployed", deployment)
    return deployment.release


def _start(
    session: HostSession,
    experiment: Experiment,
    options: Options,
    record: RunRecord,
    report: Callable[[str, object], None],
) -> tuple[tuple[Gpu, ...], dict[str, Any]]:
    """Choose GPUs and start; as long as they are busy and there is time to wait, again.

    Where another launch was faster and only a number was asked for, the choice is made anew at once.
    """
    wanted = options.gpus if options.gpus is not None else experiment.gpus
    needed = experiment.config.num_gpus if options.program.num_gpus is None else options.program.num_gpus
    if options.gpus is not None and not needed:
        raise ConfigurationError(
            f"--gpus must be left out where nothing runs on a GPU, got {','.join(map(str, options.gpus))}",
            hint="trainer.pipeline names the devices of an experiment",
        )
    deadline = time.monotonic() + options.wait_gpu_s
    lost: set[str] = set()
    patience_s = RECONNECT_S if options.wait_gpu_s else 0.0
    away = partial(report, "waiting")
    unknown_since: float | None = None

    def wait(error: DflashctlError, seconds: float) -> None:
        report("waiting", error)
        if dead := options.retries:  # nobody waits hours for GPUs that it may not have then
            request = {"root": session.host.root, "run": dead.run, "launch_id": dead.launch_id}
            patiently(session, partial(session.call, "runs", "check_retry", request), patience_s, away)
        time.sleep(seconds)

    while True:
        # looking changes nothing, and who waits does not give up at the first lost link
        found = patiently(session, lambda: query_gpus(session), patience_s, away) if needed else GpuReport()
        try:
            chosen = placement.choose(found, session.host, wanted, needed, options.force)
            report("gpus", chosen)
            if found.doubt:
                report("doubt", found.doubt)
            return chosen, _send(session, experiment, options, record, chosen)
        except GpuUnknownError as error:
            # who waits, perhaps for hours, does not give up at one look that failed
            unknown_since = unknown_since or time.monotonic()
            if time.monotonic() - unknown_since >= patience_s:
                raise
            wait(error, WAIT_S)
        except GpuBusyError as error:
            unknown_since = None
            taken = set(error.details.get("taken", ()))  # type: ignore[call-overload]
            if taken - lost and not isinstance(wanted, tuple):
                lost |= taken
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            wait(error, min(WAIT_S, left))


def _send(
    session: HostSession, experiment: Experiment, options: Options, record: RunRecord, chosen: tuple[Gpu, ...]
) -> dict[str, Any]:
    request = _request(session, experiment, options, record, chosen)
    answer = session.call("runs", "launch", request, timeout_s=options.startup_seconds + _LAUNCH_MARGIN_S)
    return {**answer, "overridden": [*placement.overridden(chosen, session.host), *answer["overridden"]]}


def _adopt(
    session: HostSession, record: RunRecord, history: History, cause: BaseException
) -> tuple[tuple[Gpu, ...], dict[str, Any]]:
    """The run that a broken call may have started, looked for by its launch id; a launch is never sent twice."""
    doubt = f"whether it started is not known; `dflashctl runs --refresh --host {session.host.name}` tells later"
    request = {"root": session.host.root, "launch_id": record.launch_id}
    try:
        session.reconnect()
        found = session.call("runs", "find", request, timeout_s=_FIND_S)["run"]
    except DflashctlError:
        raise _broken(cause, doubt) from None
    if found is None:
        raise _broken(cause, "nothing was started") from None
    state = found["state"]
    with suppress(EnvironmentFault):  # said below by name, and again by `launch` where it goes on
        history.append(replace(record, run=state["run"], state=state["state"], exit_code=state["exit_code"]))
    if isinstance(cause, KeyboardInterrupt):
        raise InterruptedByUser(
            f"{state['run']} has started on {record.host} and goes on", hint=f"dflashctl tail {state['run']}"
        )
    gpus = tuple(Gpu(**gpu) for gpu in found["record"].get("gpus", []))
    extra: dict[str, Any] = {
        "warning": f"{cause}; the run was found by its launch id",
        "cleared_cache": None,
        "watched_s": 0.0,
        "lines": [],
        "overridden": [],
    }
    return gpus, {**state, "run_dir": found["run_dir"], "log": found["log"], **extra}


def _broken(cause: BaseException, then: str) -> DflashctlError:
    if isinstance(cause, KeyboardInterrupt):
        return InterruptedByUser(f"interrupted; {then}")
    assert isinstance(cause, DflashctlError)
    return type(cause)(f"{cause}; {then}")


def _request(
    session: HostSession, experiment: Experiment, options: Options, record: RunRecord, chosen: Sequence[Gpu]
) -> dict[str, Any]:
    host = session.host
    config = experiment.config.to_dict()
    config["run"]["root"] = host.root
    return {
        "root": host.root,
        "tag": record.tag,
        "launch_id": record.launch_id,
        "release": record.release,
        "python": host.python,
        "module": options.program.module,
        "arguments": options.program.arguments,
        "env": {**host.env, **placement.visible_devices(chosen)},
        "resume": {"run": options.resume.run, "launch_id": options.resume.launch_id} if options.resume else None,
        "retries": {"run": options.retries.run, "launch_id": options.retries.launch_id} if options.retries else None,
        "secrets": dict(options.secrets),
        "config": config,
        "cache": "warm" if options.warm_cache else "own",
        "gpu_model": chosen[0].name if chosen and chosen[0].name else "cpu",
        "clear_cache": options.clear_cache,
        "startup_s": options.startup_seconds,
        "force": options.force,
        "log_lines": LOG_LINES,
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
            "launched_by": who(),
        },
    }


def _launched(record: RunRecord, chosen: tuple[Gpu, ...], answer: dict[str, Any]) -> Launched:
    return Launched(
        record=record,
        tag=record.tag,
        host=record.host,
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
                "oom_kills",
                "warning",
                "cleared_cache",
                "watched_s",
                "lines",
                "overridden",
            )
        },
    )


def _death(launched: Launched) -> StartupDeath:
    how = f"exit code {launched.exit_code}" if launched.exit_code is not None else "no exit code"
    if launched.exit_code is not None and launched.state == "killed":
        how = f"signal {launched.exit_code - 128}" + (", out of memory, the kernel says" if launched.oom_kills else "")
    text = "\n".join(launched.lines) or "(the log is empty)"
    return StartupDeath(
        f"{launched.run} died within {launched.watched_s:.0f} s of its start ({launched.state}, {how}); its log ends:\n{text}",
        hint=f"the whole log: dflashctl tail {launched.run} --no-follow",
        details=launched.document() | {"lines": launched.lines},
    )


def _named(gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    names = ("index", "uuid", "name", "memory_used_mib")
    return [{name: getattr(gpu, name) for name in names} for gpu in gpus]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
