"""The hypervisor node `pve`: namespaces of its own on this machine, entered through its process 1 (node_init.py).

Everything that the lab starts lives in there: sshd, `pct`, containers, fake programs. Files are reached from outside
through /proc/PID/root, programs are run with nsenter. The network is the machine's, so that 127.0.0.1 is shared.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from labkit.cgroups import Cgroups
from labkit.deadline import LabError, wait_until
from labkit.requirements import SEARCH_PATH

STATE = "/run/dflash-lab"
"""The lab's directory inside the node."""

Completed = subprocess.CompletedProcess[bytes]

ENTER_CGROUPS = 'while [ "$1" != -- ]; do echo $$ >"$1"; shift; done; shift; exec "$@"'


class Machine(Protocol):
    """What the node and a container have in common: a file system that tests may write."""

    owner_uid: int
    """The uid on this machine that its root has."""

    def path(self, inner: str) -> Path:
        """Give the path from outside of an absolute path in there."""
        ...


class Node:
    """A running node. `close` ends everything in it; so does the end of the process that made it."""

    owner_uid = 0

    def __init__(self, cgroups: Cgroups, settings: dict[str, Any], lock_fd: int, log: Path) -> None:
        """Start the node and wait until its mounts are made and its daemons started."""
        self._cgroups = cgroups
        self._log = log
        unshare = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child"]
        init = [_plain_python(), "-IS", str(Path(__file__).with_name("node_init.py"))]
        entries = [str(path) for path in cgroups.create()]
        command = ["sh", "-ec", ENTER_CGROUPS, "sh", *entries, "--", *unshare, "--propagation", "private", "--", *init]
        with log.open("ab") as errors:
            self._init = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={"PATH": SEARCH_PATH, "LC_ALL": "C.UTF-8"},
                pass_fds=[lock_fd],  # Held by every part of the node, so that `sweep` knows that it lives.
                start_new_session=True,  # Ctrl-C is for pytest, which then closes the lab in order.
            )
        reply = self._first_reply(settings)
        self.outer_pid: int = reply["outer_pid"]
        self.daemon_pids: list[int] = reply["daemon_pids"]
        cgroups.enable_controllers()

    def _first_reply(self, settings: dict[str, Any]) -> dict[str, Any]:
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        try:
            self._init.stdin.write(json.dumps(settings).encode() + b"\n")
            self._init.stdin.flush()
            answered, _, _ = select.select([self._init.stdout], [], [], 20)
            line = self._init.stdout.readline() if answered else b""
        except BrokenPipeError:
            line = b""
        if not line:
            self.close()
            raise LabError(f"the lab's node did not start:\n{self._log.read_text(errors='replace')}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def path(self, inner: str) -> Path:
        """Give the path from outside of an absolute path on the node."""
        return Path(f"/proc/{self.outer_pid}/root") / inner.lstrip("/")

    def command(self, argv: Sequence[str]) -> list[str]:
        """Give the words that run `argv` on the node, for a Popen of one's own."""
        spaces = ["--mount", "--uts", "--ipc", "--pid", "--cgroup"]
        return ["nsenter", "--target", str(self.outer_pid), *spaces, "--wd=/", "--", *argv]

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0, check: bool = False) -> Completed:
        """Run a program on the node as root, without ssh. `check` raises LabError when it fails."""
        done = subprocess.run(
            self.command(argv),
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            env={"PATH": SEARCH_PATH, "LC_ALL": "C.UTF-8", "HOME": f"{STATE}/home/root"},
        )
        if check and done.returncode != 0:
            raise LabError(f"on the node, {list(argv)} ended with {done.returncode}:\n{done.stderr.decode()}")
        return done

    def install(self, program: Path, inner: str) -> None:
        """Put an executable in place. A Python one gets this session's interpreter, where every user reaches it."""
        text = program.read_text()
        if "python" in text.partition("\n")[0]:
            interpreter = f"{STATE}/python/bin/{Path(_plain_python()).name}"
            text = f"#!{interpreter} -IS\n" + text.partition("\n")[2]
        self.path(inner).write_text(text)
        self.path(inner).chmod(0o755)

    def children(self, pid: int) -> list[int]:
        """List the child processes of a process, by the node's own pids."""
        with contextlib.suppress(OSError):  # It may end at any moment.
            return [int(word) for word in self.path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def send_signal(self, pid: int, number: signal.Signals) -> None:
        """Signal a process by the node's own pid."""
        self.run(["sh", "-c", 'kill -s "$1" "$2"', "sh", number.name.removeprefix("SIG"), str(pid)], check=True)

    def processes(self) -> dict[int, str]:
        """List what runs on the node, containers included: the node's own pid -> command line."""
        return processes(self.path("/proc"))

    def close(self) -> None:
        """End the node with everything in it, and take its cgroups away. May be called twice."""
        for pipe in (self._init.stdin, self._init.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        try:
            self._init.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._init.kill()  # unshare takes process 1 with it (--kill-child).
            self._init.wait(timeout=30)
        self._cgroups.remove()

    def wait_for_port(self, port: int) -> None:
        """Wait until something on the node listens on a port of 127.0.0.1."""
        wanted = f"0100007F:{port:04X} 00000000:0000 0A"
        try:
            wait_until(lambda: wanted in Path("/proc/net/tcp").read_text(), f"a listener on port {port}")
        except LabError as error:
            log = self.path(f"{STATE}/disk/sshd.log").read_text(errors="replace")
            raise LabError(f"{error}; sshd says:\n{log[-3000:]}") from None


def processes(proc: Path) -> dict[int, str]:
    """List the processes of a mounted /proc; a zombie has an empty command line."""
    found: dict[int, str] = {}
    for entry in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def _plain_python() -> str:
    """Give the interpreter behind the virtual environment: it starts faster and does not look for one."""
    return os.path.realpath(shutil.which("python3", path=f"{sys.base_prefix}/bin") or sys.executable)
