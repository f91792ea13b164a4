"""A conversation with one host: scripts and the programs of `onhost/` go over one `Remote`.

The outer command line is always the same list of words. The script travels on standard input, its length in front of it, the
payload behind it; so values with spaces, quotes or newlines never meet a shell that would read them. Output is marked at both
ends with a number that nobody can guess, so that what rc files print before and after is cut away.
"""

import contextlib
import functools
import json
import secrets
import shlex
import time
from collections.abc import Callable
from importlib import resources
from typing import Any, TypeVar

from dflashctl import errors
from dflashctl.container import Gateway
from dflashctl.errors import BrokenAnswerError, ContainerError, DflashctlError, EnvironmentFault, HostError, RemoteTimeoutError
from dflashctl.hosts import Host
from dflashctl.remote import Completed, LocalRemote, Remote

T = TypeVar("T")

MINIMUM_PYTHON = "3.11"
CALL_S = 60.0
_MARGIN_S = 10.0
_AGAIN_S = 1.0
_OPENING = b"dflashctl-ready\n"
_READ_SCRIPT = 'echo dflashctl-ready; IFS= read -r n && eval "$(head -c "$n")"'
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = (
    *("entry", "layout", "secrets", "processes", "states", "logs", "caches", "leases", "wrapper"),
    *("environment", "doctor", "releases", "transfer", "runs", "stop"),
)
# Modules are made under their own names before they run, so that they import each other where nothing is installed.
_LOADER = (
    "import json,sys,types\n"
    "b=sys.stdin.buffer\n"
    "for name,text in json.loads(b.read(int(b.readline()))):\n"
    "    m=sys.modules[name]=types.ModuleType(name)\n"
    "    setattr(sys.modules.get(name.rpartition('.')[0],m),name.rpartition('.')[2],m)\n"
    "    exec(compile(text,name,'exec'),m.__dict__)\n"
)
_ERRORS = {kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DflashctlError)}


class HostSession:
    """One host for the length of one command; a context manager."""

    def __init__(self, host: Host, remote: Remote) -> None:
        """Talk to `host` through `remote`."""
        self.host = host
        self._remote = remote
        self._gateway = Gateway(host.container, remote.user) if host.container else None
        self.round_trips = 0

    def __enter__(self) -> "HostSession":
        """Nothing is opened before it is needed."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the connection back."""
        self._remote.close()

    def reconnect(self) -> None:
        """Drop the connection; the next call opens a new one."""
        self._remote.close()

    def script(self, text: str, payload: bytes = b"", timeout_s: float = CALL_S, outside: bool = False) -> Completed:
        """Run a POSIX sh script where the trainer lives (`outside`: on the machine around the container).

        `payload` is on its standard input, which stays open to the end; the output comes without the noise around it.
        Raises HostError or ContainerError when the script was never reached, RemoteTimeoutError when it outlived `timeout_s`.
        """
        mark = f"dflashctl-{secrets.token_hex(8)}"
        body = (
            f'PATH="${{PATH:+$PATH:}}{_PATH}" LC_ALL=C; export PATH LC_ALL; cd /\n'
            f"echo {mark}; (\n{text}\n); printf '\\n%s %s\\n' {mark} $?"
        ).encode()
        way = [] if self._gateway is None else self._gateway.rights() if outside else self._gateway.words()
        argv = [*way, "timeout", "-k", "5", f"{timeout_s:.0f}", "/bin/sh", "-c", _READ_SCRIPT]
        self.round_trips += not outside
        try:
            done = self._remote.exchange(argv, b"%d\n%b%b" % (len(body), body, payload), _OPENING, timeout_s + _MARGIN_S)
        except RemoteTimeoutError as error:
            raise (None if outside else self._refusal("", error)) or error from None
        return self._between(done, mark.encode(), timeout_s, outside)

    def _between(self, done: Completed, mark: bytes, timeout_s: float, outside: bool) -> Completed:
        _, begun, rest = done.stdout.partition(mark + b"\n")
        out, ended, tail = rest.rpartition(b"\n" + mark + b" ")
        if begun and ended:
            return Completed(int(tail.split()[0]), out, done.stderr)
        name = self.host.name
        if done.exit_code is None:
            raise HostError(f"host {name}: the connection broke before the answer was complete")
        if begun and done.exit_code in (124, 137):
            raise RemoteTimeoutError(f"host {name} did not finish within {timeout_s:.0f} s")
        said = done.stderr.decode(errors="replace").strip()
        refusal = None if begun or outside else self._refusal(said, None)
        last = said.splitlines()[-1] if said else "nothing was said"
        raise refusal or HostError(f"host {name}: no answer from its shell (exit code {done.exit_code}): {last}")

    def _refusal(self, said: str, timed_out: Exception | None) -> ContainerError | None:
        """What the container's gateway has against us, the machine around it asked where its words are not enough."""
        if self._gateway is None:
            return None
        facts: dict[str, str] = {}
        if timed_out or "does not exist" in said:
            with contextlib.suppress(DflashctlError):
                lines = self.script(self._gateway.inquiry(), timeout_s=15, outside=True).stdout.decode().splitlines()
                facts = {key: value for key, _, value in (line.partition("=") for line in lines) if value}
        return self._gateway.refusal(self.host, said, facts)

    def call(
        self,
        program: str,
        verb: str,
        args: dict[str, Any],
        payload: bytes = b"",
        timeout_s: float = CALL_S,
        python: str | None = None,
    ) -> Any:
        """Run one verb of `onhost/<program>.py` with the host's interpreter (or another); a fault comes back as our error."""
        modules = _sources()
        request = json.dumps({"verb": verb, "args": {"minimum_python": MINIMUM_PYTHON, **args}}).encode() + b"\n"
        start = f"from dflashctl.onhost import entry, {program}\nentry.serve({program}.VERBS)\n"
        text = json.dumps([*modules, ["__dflashctl__", start]]).encode()
        python = shlex.quote(python or self.host.python)
        script = f"[ -x {python} ] || {{ echo missing; exit 127; }}\nexec {python} -B -c {shlex.quote(_LOADER)}"
        done = self.script(script, b"%d\n%b%b%b" % (len(text), text, request, payload), timeout_s)
        return self._answer(done)

    def _answer(self, done: Completed) -> Any:
        if done.exit_code == 127 and done.stdout.strip() == b"missing":
            raise EnvironmentFault(
                f"host {self.host.name} has no interpreter at {self.host.python}",
                hint=f"set hosts.{self.host.name}.python in hosts.yaml",
            )
        try:
            answer = json.loads(done.stdout.splitlines()[-1])
            if not answer.keys() & {"fault", "result"}:
                raise ValueError
        except (ValueError, IndexError, AttributeError, RecursionError):
            said = done.stderr.decode(errors="replace").strip().splitlines()
            text = said[-1] if said else f"exit code {done.exit_code}, nothing was said"
            raise BrokenAnswerError(f"host {self.host.name}: {self.host.python} failed: {text}") from None
        if "fault" not in answer:
            return answer["result"]
        fault = answer["fault"]
        kind = _ERRORS.get(fault["code"], EnvironmentFault)
        raise kind(f"host {self.host.name}: {fault['message']}", hint=fault["hint"], details=fault.get("details"))


def patiently(session: HostSession, ask: Callable[[], T], patience_s: float, note: Callable[[str], None] | None = None) -> T:
    """What `ask` answers, asked again over a new connection while the host or its container is away, for `patience_s` at most.

    Only for what may be done twice. `note` is told once of an absence that is waited for. Raises the last HostError,
    ContainerError, RemoteTimeoutError or BrokenAnswerError.
    """
    deadline = None
    while True:
        try:
            return ask()
        except (
            HostError,
            ContainerError,
            RemoteTimeoutError,
            BrokenAnswerError,
        ) as error:  # the last: one that was killed there
            if deadline is None:
                deadline = time.monotonic() + patience_s
                if note and patience_s > 0:
                    note(f"{error}; connecting again, for {patience_s / 60:.0f} minutes at most")
            if time.monotonic() >= deadline:
                raise
            session.reconnect()
            time.sleep(_AGAIN_S)


def open_session(host: Host) -> HostSession:
    """A session with `host`; raises HostError when ssh_config cannot be read."""
    if host.transport == "local":
        return HostSession(host, LocalRemote())
    from dflashctl.ssh import SshRemote  # paramiko takes longer to import than most commands to run

    return HostSession(host, SshRemote(host.ssh or host.name, host.name))


@functools.cache
def _sources() -> list[list[str]]:
    package = resources.files("dflashctl.onhost")
    names = [["dflashctl", ""], ["dflashctl.onhost", ""]]
    return names + [[f"dflashctl.onhost.{n}", package.joinpath(f"{n}.py").read_text("utf-8")] for n in _PROGRAMS]
