"""Is a host fit for runs: the way to it, its interpreter, and what `onhost/doctor.py` finds there, as a list of checks.

Each check says what it found, a command that shows the same, and the fix. Nothing is changed, and a host that cannot be reached
is a failed check, not an error: that is what one asks a doctor for.
"""

import shlex
import time
from dataclasses import dataclass
from typing import Any, Literal

from dflashctl.environment import pythons, release, requirements
from dflashctl.errors import ContainerError, DflashctlError, ExitCode
from dflashctl.hosts import typed
from dflashctl.session import MINIMUM_PYTHON, HostSession
from dflashctl.watch import survey

_EXAMINE_S = 400.0
_SKEW_S = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "warning", "failed", "unknown"]
    command: str
    found: str
    fix: str | None = None
    exit_code: int = ExitCode.ENVIRONMENT
    """Of `dflashctl doctor`, where this check failed or could not be made."""

    @property
    def is_well(self) -> bool:
        """A run may start in spite of it."""
        return self.state in ("ok", "warning")


def examine(session: HostSession) -> list[Check]:
    """Every check, in the order in which one thing needs the other; what lies behind a failed one is left out."""
    checks = _way(session)
    if not checks[-1].is_well:
        return checks
    interpreter, usable, helper = _interpreter(session)
    gpus, idle, count = _gpus(session)
    checks += [interpreter, gpus]
    if helper is None:
        return checks
    request = {
        "root": session.host.root,
        "python": usable,
        "env": dict(session.host.env),
        "requirements": requirements(),
        "idle": idle,
        "gpus": count,
    }
    begun = time.time()
    try:
        answer = session.call("doctor", "examine", request, timeout_s=_EXAMINE_S, python=helper)
    except DflashctlError as error:
        command = f"{helper} -B -c ..."
        return [*checks, Check("host", "failed", command, str(error), error.hint, error.exit_code)]
    return [*checks, *(Check(**found) for found in answer["checks"]), clock(begun, answer["now"], time.time())]


def exit_code(checks: list[Check]) -> int:
    """The gravest of what is not well; warnings are."""
    return max((int(check.exit_code) for check in checks if not check.is_well), default=ExitCode.OK)


def document(checks: list[Check]) -> dict[str, Any]:
    """For --json."""
    names = ("name", "state", "command", "found", "fix")
    return {"checks": [{name: getattr(check, name) for name in names} for check in checks]}


def _way(session: HostSession) -> list[Check]:
    """The connection, its host key included, and the container behind it; stops at the first that fails."""
    host, checks = session.host, []
    if host.ssh:
        checks.append(_step(session, "ssh", f"{typed(host.ssh)} true", outside=host.container is not None))
    if host.container and (not checks or checks[-1].is_well):
        command = f"/usr/sbin/pct exec {host.container.id} -- true"
        checks.append(_step(session, "container", f"{typed(host.ssh)} {command}" if host.ssh else command, outside=False))
    return checks or [_step(session, "host", "true", outside=False)]


def _step(session: HostSession, name: str, command: str, outside: bool) -> Check:
    begun = time.monotonic()
    try:
        who = session.script("id -un; uname -sr", timeout_s=30, outside=outside).stdout.decode(errors="replace").split("\n")
    except DflashctlError as error:
        state: Literal["failed"] = "failed"
        inside = isinstance(error, ContainerError) or name == "container"
        return Check(name, state, command, str(error), error.hint, ExitCode.CONTAINER if inside else error.exit_code)
    known = "; its host key is the one in known_hosts" if name == "ssh" else ""
    took = f"in {time.monotonic() - begun:.1f} s"
    return Check(name, "ok", command, f"answers {took} as {who[0]} on {who[1] if len(who) > 1 else '?'}{known}")


def _interpreter(session: HostSession) -> tuple[Check, str | None, str | None]:
    """The check, the trainer's interpreter where it serves, and one that can run the other checks."""
    python, name = session.host.python, session.host.name
    command = f"{shlex.quote(python)} --version"
    try:
        found = pythons(session)
    except DflashctlError as error:
        return Check("interpreter", "unknown", command, str(error), error.hint), None, None
    good = [path for path, version in found.items() if release(version) >= release(MINIMUM_PYTHON)]
    helper = next((path for path, version in found.items() if release(version) >= (3, 8)), None)
    if python in good:
        return Check("interpreter", "ok", command, f"{python} is {found[python]}"), python, helper
    got = f"{python} is {found[python]}, the trainer needs {MINIMUM_PYTHON}" if python in found else f"{python} does not run"
    elsewhere = (
        f"set hosts.{name}.python to {good[0]}, which is {found[good[0]]}" if good else f"install python {MINIMUM_PYTHON}"
    )
    return Check("interpreter", "failed", command, got, f"{elsewhere}; or: dflashctl setup {name}"), None, helper


def _gpus(session: HostSession) -> tuple[Check, list[str], int]:
    """The check, the uuids of idle GPUs and the number of all."""
    found, code = survey(session)
    command = f"dflashctl gpus {session.host.name}"
    gpus = found["gpus"]
    words = [f"GPU {'?' if gpu['index'] is None else gpu['index']} {gpu['state']}: {gpu['reason']}" for gpu in gpus]
    text = "; ".join(filter(None, (found["error"], found["note"], *words)))
    idle = [gpu["uuid"] for gpu in gpus if gpu["state"] == "idle" and gpu["uuid"]]
    if found["error"]:
        return Check("gpus", "failed", command, text, "what the sentence says", code), idle, len(gpus)
    if any(gpu["state"] == "unknown" for gpu in gpus):
        fix = "see to what the sentence says, or leave the GPU out with hosts.yaml's gpus"
        return Check("gpus", "unknown", command, text, fix, ExitCode.GPU_UNKNOWN), idle, len(gpus)
    if not gpus and session.host.gpus:
        fix = f"see to the driver, or take hosts.{session.host.name}.gpus out"
        return Check("gpus", "failed", command, f"{text}, but hosts.yaml names GPUs", fix, ExitCode.GPU_UNKNOWN), idle, 0
    return Check("gpus", "ok", command, text), idle, len(gpus)


def clock(begun: float, theirs: float, now: float) -> Check:
    """Its clock against ours; what lies within the time that the question took cannot be told from the way there."""
    off = theirs - now if theirs > now else min(0.0, theirs - begun)
    text = f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} this machine" if abs(off) > 1 else "as this machine's"
    state: Literal["ok", "warning"] = "warning" if abs(off) > _SKEW_S else "ok"
    fix = "set it (chrony or systemd-timesyncd; a container has its host's clock)" if state == "warning" else None
    return Check("clock", state, "date -u +%s", text, fix)
