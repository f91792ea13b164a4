"""One unprivileged LXC container as Proxmox makes it: id map from 100000, cgroups lxc/ID/ns, config in /etc/pve.

Its root file system is a few folders; /usr is the machine's own below a writable layer, so every program of the machine is
there and a test may add or hide some. /workspace is a directory of its own on disk. All of it lies inside the node.
"""

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.cgroups import Cgroups
from labkit.deadline import LabError, wait_until
from labkit.node import STATE, Completed, Node, processes

FIRST_UID = 100000
"""Where the container's uids begin on the machine; its root is this one."""

FOLDERS = ("usr", "etc", "proc", "sys", "dev", "run", "tmp", "root", "var/tmp", "home", "workspace", "dev/shm")

COPIED_FROM_ETC = ("alternatives", "ld.so.cache", "profile")
"""What programs of the machine's /usr need of its /etc; `awk` is a symlink into alternatives."""

INITTAB = """\
::sysinit:/bin/busybox ip link set lo up
::sysinit:/bin/busybox touch /run/booted
"""
"""Without `lo` torchrun would hang; the touched file tells the lab that both are done."""

LXC_CONFIG = """\
lxc.uts.name = ct{vmid}
lxc.rootfs.path = dir:{rootfs}
lxc.init.cmd = /bin/busybox init
lxc.signal.halt = SIGUSR1
lxc.apparmor.profile = unconfined
lxc.net.0.type = empty
lxc.pty.max = 1024
lxc.console.path = none
lxc.idmap = u 0 100000 65536
lxc.idmap = g 0 100000 65536
lxc.cgroup.relative = 0
lxc.cgroup.dir.monitor = lxc.monitor/{vmid}
lxc.cgroup.dir.container = lxc/{vmid}
lxc.cgroup.dir.container.inner = ns
lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed:force
lxc.mount.entry = {usr} usr none rbind 0 0
lxc.mount.entry = tmpfs dev/shm tmpfs nosuid,nodev,create=dir 0 0
lxc.mount.entry = tmpfs run tmpfs nosuid,nodev,mode=755 0 0
"""

PVE_CONFIG = """\
arch: amd64
cores: 2
hostname: ct{vmid}
memory: 2048
ostype: debian
rootfs: local:{vmid}/vm-{vmid}-disk-0.raw,size=8G
swap: 0
unprivileged: 1
lxc.cgroup2.devices.allow: c 195:* rwm
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is special about a container."""

    memory_mib: int | None = None
    """A real limit: beyond it the kernel kills."""
    workspace_mib: int | None = None
    """Make /workspace a tmpfs of this size, for a disk that is really full; None is a directory on disk."""
    binds: tuple[Path, ...] = ()
    """Directories of this machine that are there too, read-only, at the same path; see `python_paths`."""


class Container:
    """A container of the lab. Made stopped; `start` boots it in about 50 ms."""

    owner_uid = FIRST_UID

    def __init__(self, node: Node, cgroups: Cgroups, disk: Path, vmid: int, options: Options) -> None:
        """Lay out the files of the container on the node; `disk` is the lab's directory on the machine."""
        self.vmid = vmid
        self.options = options
        self._node = node
        self._cgroups = cgroups
        self._lxc_path = f"{STATE}/{cgroups.name}"
        self._home = f"{self._lxc_path}/{vmid}"
        self._disk_workspace = disk / f"workspace-{vmid}"
        self._pid = 0
        if options.memory_mib is not None and not cgroups.has_memory_limit:
            raise LabError("container memory cannot be limited here: the memory controller is not ours to use")
        try:
            self._make_rootfs()
            self._mount_layers()
            self._write_configs()
        except BaseException:
            self.destroy()
            raise

    @property
    def workspace(self) -> Path:
        """/workspace as this test session sees it."""
        return self._disk_workspace if self.options.workspace_mib is None else self.path("/workspace")

    def path(self, inner: str) -> Path:
        """Give the path from outside of an absolute path inside the running container, with all that is mounted there."""
        return self._node.path(f"/proc/{self._pid}/root") / inner.lstrip("/")

    def write(self, inner: str, text: str, mode: int = 0o644) -> Path:
        """Write a file that belongs to the container's root; parents are made."""
        path = self.path(inner)
        missing = [parent for parent in path.parents if not parent.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        for made in (path, *missing):
            os.chown(made, FIRST_UID, FIRST_UID)
        return path

    def start(self) -> None:
        """Boot, and wait until its init has brought `lo` up."""
        log = f"{STATE}/disk/lxc-{self.vmid}.log"
        done = self._node.run(["lxc-start", *self._named(), "-d", "-l", "INFO", "-o", log])
        if done.returncode != 0:
            tail = self._node.path(log).read_text(errors="replace")[-3000:]
            raise LabError(f"container {self.vmid} did not start:\n{done.stderr.decode()}\n{tail}")
        self._pid = int(self._node.run(["lxc-info", *self._named(), "-pH"], check=True).stdout)
        booted = self.path("/run/booted")
        wait_until(lambda: booted.exists() and set(self.processes()) == {1}, f"container {self.vmid} to boot")

    def stop(self) -> None:
        """Kill everything in it, as `pct stop` does; no process has a say."""
        self.unfreeze()
        self._node.run(["lxc-stop", *self._named(), "--kill"])
        self._wait_stopped()

    def crash(self) -> None:
        """Kill its init from outside, as a host's OOM killer or a fault would."""
        self._node.send_signal(self._pid, signal.SIGKILL)
        self._wait_stopped()

    def freeze(self) -> None:
        """Stop every process in it without a word, as a backup in suspend mode does: it still counts as running."""
        self._node.run(["lxc-freeze", *self._named()], check=True)

    def unfreeze(self) -> None:
        """Let it go on; harmless when it is not frozen."""
        if self.state() == "FROZEN":
            self._node.run(["lxc-unfreeze", *self._named()], check=True)

    @contextlib.contextmanager
    def stuck(self, inner: int) -> Iterator[None]:
        """Keep one process, by its pid in there, from running and from dying (cgroup v1): it shows state D."""
        directory = self._cgroups.directory("freezer") / f"lxc/{self.vmid}/ns/stuck"
        directory.mkdir()
        (directory / "cgroup.procs").write_text(str(self._outer_pid(inner)))
        (directory / "freezer.state").write_text("FROZEN")
        wait_until(lambda: (directory / "freezer.state").read_text().strip() == "FROZEN", "the process to freeze")
        try:
            yield
        finally:
            (directory / "freezer.state").write_text("THAWED")

    def _outer_pid(self, inner: int) -> int:
        """The pid on this machine of a process in there."""
        procs = (self._cgroups.directory("freezer") / f"lxc/{self.vmid}/ns/cgroup.procs").read_text().split()
        return self._named_inside(inner, {int(pid): Path(f"/proc/{pid}") for pid in procs})

    def pid_on_node(self, inner: int) -> int:
        """The pid on the node of a process in there."""
        entries = {pid: self._node.path(f"/proc/{pid}") for pid in self._node.processes()}
        return self._named_inside(inner, entries)

    def _named_inside(self, inner: int, entries: dict[int, Path]) -> int:
        for pid, entry in entries.items():
            with contextlib.suppress(OSError):  # Any but the one that is meant may end while we look.
                pids = (entry / "status").read_text().partition("NSpid:")[2].split("\n")[0].split()
                if int(pids[-1]) == inner and f"/lxc/{self.vmid}/" in (entry / "cgroup").read_text():
                    return pid
        raise LabError(f"container {self.vmid} has no process {inner}")

    def destroy(self) -> None:
        """Stop it and remove every trace of it from the node, its config included: its id becomes unknown."""
        self.stop()
        self._node.run(["umount", "--lazy", *self._bind_points(), f"{self._home}/usr"])
        self._pve_config().unlink(missing_ok=True)
        shutil.rmtree(self._node.path(self._home), ignore_errors=True)
        shutil.rmtree(self._disk_workspace, ignore_errors=True)

    def state(self) -> str:
        """Give LXC's own word for it: RUNNING, STOPPED, FROZEN..."""
        return self._node.run(["lxc-info", *self._named(), "-sH"]).stdout.decode().strip()

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60, check: bool = False) -> Completed:
        """Run a program inside, straight and with a full PATH: to set a scene, not to test `pct`."""
        command = ["lxc-attach", *self._named(), "--clear-env", "--", *argv]
        return self._node.run(command, stdin=stdin, timeout_s=timeout_s, check=check)

    def start_job(self, script: str) -> None:
        """Start a shell script inside that outlives this call, with its output nowhere."""
        self.run(["sh", "-c", 'setsid sh -c "$1" </dev/null >/dev/null 2>&1 &', "sh", script], check=True)

    def processes(self) -> dict[int, str]:
        """List what runs inside, its init (1) included: pid in there -> command line."""
        return processes(self.path("/proc"))

    def oom_kills(self) -> int:
        """Count the processes in it that the kernel has killed for memory."""
        return self._cgroups.oom_kills(str(self.vmid))

    def _named(self) -> list[str]:
        return ["-P", self._lxc_path, "-n", str(self.vmid)]

    def _wait_stopped(self) -> None:
        wait_until(lambda: self.state() == "STOPPED", f"container {self.vmid} to stop")

    def _pve_config(self) -> Path:
        return self._node.path(f"/etc/pve/nodes/pve/lxc/{self.vmid}.conf")

    def _make_rootfs(self) -> None:
        rootfs = self._node.path(f"{self._home}/rootfs")
        for name in FOLDERS:
            (rootfs / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (rootfs / name).symlink_to(f"usr/{name}")
        files = {"passwd": "root:x:0:0:root:/root:/bin/bash\n", "group": "root:x:0:\n", "inittab": INITTAB}
        files |= {"hosts": f"127.0.0.1 localhost\n127.0.1.1 ct{self.vmid}\n::1 localhost\n", "hostname": f"ct{self.vmid}\n"}
        files["nsswitch.conf"] = "passwd: files\ngroup: files\nhosts: files\n"  # There is no network to ask.
        for name, text in files.items():
            (rootfs / "etc" / name).write_text(text)
        for name in COPIED_FROM_ETC:
            source = Path("/etc", name)
            if source.is_dir():
                shutil.copytree(source, rootfs / "etc" / name, symlinks=True)
            elif source.exists():
                shutil.copy(source, rootfs / "etc" / name)
        self._disk_workspace.mkdir()
        for made in (self._disk_workspace, rootfs, *rootfs.rglob("*")):
            os.chown(made, FIRST_UID, FIRST_UID, follow_symlinks=False)
        for name in ("tmp", "var/tmp", "dev/shm"):
            (rootfs / name).chmod(0o1777)

    def _mount_layers(self) -> None:
        """Mount from the node, where root may reach every source: the container's root may not enter a 0700 home."""
        for name in ("usr", "upper/bin", "upper/local/bin", "work"):
            self._node.path(f"{self._home}/{name}").mkdir(parents=True)
        for name in ("upper", "upper/bin", "upper/local", "upper/local/bin"):
            os.chown(self._node.path(f"{self._home}/{name}"), FIRST_UID, FIRST_UID)
        home = self._home
        layers = f"lowerdir={STATE}/host-usr,upperdir={home}/upper,workdir={home}/work"
        self._node.run(["mount", "-t", "overlay", "overlay", "-o", layers, f"{home}/usr"], check=True)
        for source, point in zip(self.options.binds, self._bind_points(), strict=True):
            self._node.path(point).mkdir(parents=True)
            self._node.run(["mount", "--bind", "-o", "ro", str(source), point], check=True)

    def _bind_points(self) -> list[str]:
        return [f"{self._home}/binds/{number}" for number in range(len(self.options.binds))]

    def _write_configs(self) -> None:
        lines = [LXC_CONFIG.format(vmid=self.vmid, rootfs=f"{self._home}/rootfs", usr=f"{self._home}/usr")]
        if self.options.workspace_mib is None:
            lines.append(_entry(f"{STATE}/disk/{self._disk_workspace.name}", "/workspace", "none", "bind"))
        else:
            lines.append(_entry("tmpfs", "/workspace", "tmpfs", f"size={self.options.workspace_mib}m,mode=755"))
        for source, point in zip(self.options.binds, self._bind_points(), strict=True):
            lines.append(_entry(point, str(source), "none", "bind,ro,create=dir"))
        if self.options.memory_mib is not None:
            size = f"{self.options.memory_mib}M"
            limit = ("lxc.cgroup2.memory.max", size) if self._cgroups.is_v2 else ("lxc.cgroup.memory.limit_in_bytes", size)
            no_swap = ("lxc.cgroup2.memory.swap.max", "0") if self._cgroups.is_v2 else ("lxc.cgroup.memory.swappiness", "0")
            lines += [" = ".join(limit), " = ".join(no_swap)]
        self._node.path(f"{self._home}/config").write_text("\n".join(lines) + "\n")
        self._pve_config().parent.mkdir(parents=True, exist_ok=True)
        self._pve_config().write_text(PVE_CONFIG.format(vmid=self.vmid))


def python_paths() -> tuple[Path, ...]:
    """Give the directories to bind so that this session's interpreter, and all that it can import, runs inside.

    They are the virtual environment and the prefix of the interpreter that it was made from, by every name that a symlink
    may use. What is below /usr is there anyway.
    """
    names = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])]
    paths = {Path(name) for name in names} | {Path(name).resolve() for name in names}
    return tuple(sorted(path for path in paths if not path.is_relative_to("/usr")))


def _entry(source: str, target: str, kind: str, options: str) -> str:
    """Write one lxc.mount.entry; a space in a path is written as in fstab."""
    source, target = (text.replace(" ", "\\040") for text in (source, target.lstrip("/")))
    return f"lxc.mount.entry = {source} {target} {kind} {options} 0 0"
