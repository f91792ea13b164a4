"""The whole lab: one hypervisor node `pve` with sshd, jump host and `pct`, its containers, and a link to cut.

Bring-up takes well under a second. Nothing of it is visible on the machine but processes, three listening ports of 127.0.0.1,
one directory in the temporary folder and cgroups named after it; `close` removes those, and the next session's `sweep`
removes what a killed session left.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit import cgroups as cgroup_files
from labkit import ssh
from labkit.container import PVE_CONFIG, Container, Options, python_paths
from labkit.deadline import LabError
from labkit.link import Link
from labkit.node import STATE, Completed, Node
from labkit.pct import Pct
from labkit.smi import FakeSmi

CONTAINER_ON_OTHER_NODE = 300
"""A container that the cluster knows and this node does not have."""


class Lab:
    """A running lab. One a test session; `reset` makes it as new between tests."""

    def __init__(self) -> None:
        """Bring up the node; containers come with `container`."""
        sweep()
        self._containers: dict[int, Container] = {}
        self._undo = contextlib.ExitStack()
        try:
            self._bring_up()
        except BaseException:
            self.close()
            raise

    def _bring_up(self) -> None:
        self.directory, lock_fd = _make_locked_directory()
        self._undo.callback(os.close, lock_fd)
        self._undo.callback(shutil.rmtree, self.directory)
        self._cgroups = cgroup_files.find(self.directory.name)
        self.ports = ssh.free_ports()
        keys = self.directory / "ssh"
        keys.mkdir()
        ssh.make_keys(keys)
        self.ssh_config = ssh.write_client_files(keys, self.ports)
        """Config for `ssh -F`; its aliases are in labkit/ssh.py."""
        self.node = Node(self._cgroups, self._node_settings(keys), lock_fd, self.directory / "node.log")
        self._undo.callback(self.node.close)
        self.pct = Pct(self.node)
        self.sudo("absent")  # As Proxmox comes.
        self.smi = FakeSmi(self.node)
        """The hypervisor's nvidia-smi; not installed at first."""
        self.link = Link(self.ports.link, self.ports.pve)
        self._undo.callback(self.link.close)
        for port in (self.ports.pve, self.ports.jump):
            self.node.wait_for_port(port)

    @property
    def is_cgroup_v2(self) -> bool:
        """Whether this machine has the unified hierarchy."""
        return self._cgroups.is_v2

    def container(self, vmid: int, options: Options | None = None) -> Container:
        """Give a fresh running container; one of that id that existed before is destroyed."""
        if vmid in self._containers:
            self._containers.pop(vmid).destroy()
        made = Container(self.node, self._cgroups, self.directory, vmid, options or Options())
        self._containers[vmid] = made
        made.start()
        return made

    def container_with_python(self, vmid: int, options: Options | None = None) -> Container:
        """Give a fresh running container in which this session's Python runs, at its own path, with its packages."""
        return self.container(vmid, replace(options or Options(), binds=python_paths()))

    def smi_in(self, container: Container) -> FakeSmi:
        """Give the nvidia-smi of a container; not installed at first."""
        return FakeSmi(container)

    def ssh_command(self, alias: str, *words: str, options: Sequence[str] = ()) -> list[str]:
        """Give the words that run a remote command with the system's ssh client, for a Popen of one's own."""
        return ["ssh", "-F", str(self.ssh_config), "-T", *options, alias, *words]

    def ssh(self, alias: str, *words: str, stdin: bytes = b"", options: Sequence[str] = (), timeout_s: float = 60) -> Completed:
        """Run a remote command with the system's ssh client. Mind that ssh joins `words` with spaces for a shell."""
        command = self.ssh_command(alias, *words, options=options)
        return subprocess.run(command, input=stdin, capture_output=True, timeout=timeout_s)

    @contextlib.contextmanager
    def background(self, command: Sequence[str], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command of this machine beside the test, with pipes for its output; it is killed at the end at latest."""
        settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        with contextlib.ExitStack() as stack:
            process: subprocess.Popen[bytes] = subprocess.Popen(command, **settings)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    stack.callback(pipe.close)
            stack.callback(process.wait, timeout=30)
            stack.callback(process.kill)
            yield process

    def bashrc(self, text: str) -> None:
        """Set what root's shell reads before each ssh command: noise, a strange PATH, an `exit`."""
        self.node.path(f"{STATE}/home/root/.bashrc").write_text(text)

    def sudo(self, policy: str) -> None:
        """Let `labuser` use sudo: `allowed`, `password` (it is asked for one), or `absent` (no such program)."""
        if policy not in ("allowed", "password", "absent"):
            raise LabError(f"sudo policy must be allowed, password or absent, got {policy}")
        hidden, program = self.node.path("/usr/bin/sudo.hidden"), self.node.path("/usr/bin/sudo")
        if policy == "absent" and program.exists():
            program.rename(hidden)
        elif policy != "absent" and hidden.exists():
            hidden.rename(program)
        rule = {"allowed": f"{ssh.LABUSER} ALL=(ALL) NOPASSWD: ALL\n", "password": f"{ssh.LABUSER} ALL=(ALL) ALL\n"}
        sudoers = self.node.path("/etc/sudoers.d/lab")
        sudoers.write_text(rule.get(policy, ""))
        sudoers.chmod(0o440)

    def sshd_sessions(self) -> list[int]:
        """List the node's pids of the sshd processes that serve a connection now."""
        return [pid for daemon in self.node.daemon_pids for pid in self.node.children(daemon)]

    def freeze_sshd_sessions(self) -> None:
        """Stop every sshd that serves a connection: the peer is dead, and TCP does not know."""
        for pid in self.sshd_sessions():
            for each in (pid, *self.node.children(pid)):
                self.node.send_signal(each, signal.SIGSTOP)

    def reset(self) -> None:
        """Undo whatever a test set up, containers included: destroy all of them, end every ssh session."""
        self.link.restore()
        for pid in self.sshd_sessions():
            for each in (*self.node.children(pid), pid):
                with contextlib.suppress(LabError):
                    self.node.send_signal(each, signal.SIGKILL)
        while self._containers:
            self._containers.popitem()[1].destroy()
        self.pct.reset()
        self.smi.remove()
        self.sudo("absent")
        self.node.path(f"{STATE}/home/root/.bashrc").unlink(missing_ok=True)
        (self.directory / "ssh/known_hosts_new").write_text("")

    def close(self) -> None:
        """End everything and remove every trace. May be called twice."""
        self._undo.close()

    def _node_settings(self, keys: Path) -> dict[str, object]:
        other = f"/etc/pve/nodes/pve2/lxc/{CONTAINER_ON_OTHER_NODE}.conf"
        files = ssh.account_files() | {
            other: (0o640, PVE_CONFIG.format(vmid=CONTAINER_ON_OTHER_NODE)),
            "/etc/pve/nodes/pve/lxc/.keep": (0o644, ""),
            f"{STATE}/lxcpath": (0o644, f"{STATE}/{self.directory.name}\n"),
        }
        v1 = [(each.mount.name, each.controllers) for each in self._cgroups.hierarchies]
        return {
            "disk": str(self.directory),
            "hostname": "pve",
            "labuser_uid": ssh.LABUSER_UID,
            "cgroup_v2": self._cgroups.is_v2,
            "cgroup_v1": [] if self._cgroups.is_v2 else v1,
            "files": files,
            "daemons": ssh.write_server_files(keys, self.ports),
        }


def _make_locked_directory() -> tuple[Path, int]:
    """Make the lab's directory; it gets its name only once it is locked, so no other session sweeps it meanwhile."""
    unnamed = Path(tempfile.mkdtemp(prefix=f"new-{cgroup_files.PREFIX}"))
    unnamed.chmod(0o755)
    lock_fd = os.open(unnamed / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    return unnamed.rename(unnamed.with_name(unnamed.name.removeprefix("new-"))), lock_fd


def sweep() -> None:
    """Remove what labs left behind whose session was killed; a lab that lives holds its lock and is let alone."""
    temporary = Path(tempfile.gettempdir())
    for name in cgroup_files.names() | {path.name for path in temporary.glob(f"{cgroup_files.PREFIX}*")}:
        directory = temporary / name
        with contextlib.ExitStack() as stack:
            if (directory / "lock").exists():
                lock = stack.enter_context((directory / "lock").open("r+"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
            elif cgroup_files.find(name).is_occupied():
                continue  # Of a session with another temporary folder.
            cgroup_files.find(name).remove()
            shutil.rmtree(directory, ignore_errors=True)
