"""Process 1 of the lab's hypervisor node: makes its mounts, starts its sshds, and is its life line.

Run as a script by node.py inside fresh mount, pid, uts, ipc and cgroup namespaces (standard library only, no imports from
labkit). It lives until its stdin closes, which happens when the test session ends in whatever way; then the kernel kills
everything in the pid namespace and drops every mount of the mount namespace. So nothing that the lab starts or mounts can
outlive the session, and nothing of it is ever visible on the developer's machine.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

STATE = Path("/run/dflash-lab")


def mount(*words: str) -> None:
    """Mount something; a failure ends the node, and its stderr tells the session why."""
    subprocess.run(["mount", *words], check=True, timeout=20)


def overlay(target: str, lower: str) -> None:
    """Lay a writable layer over a directory, so that the node can change it and the machine does not notice."""
    layers = STATE / "layers" / target.strip("/").replace("/", "-")
    for name in ("upper", "work"):
        (layers / name).mkdir(parents=True)
    mount("-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={layers}/upper,workdir={layers}/work", target)


def make_mounts(settings: dict[str, Any]) -> None:
    """Give the node its own /run, /proc, /etc, /usr and cgroups.

    The machine's /usr stays at STATE/host-usr, below the containers'. Our interpreter is at STATE/python too, where every
    user may enter: its own place may be below a home that is closed to others.
    """
    mount("-t", "tmpfs", "-o", "mode=755", "dflash-lab", "/run")
    mount("-t", "proc", "proc", "/proc")
    for name in ("disk", "host-usr", "python", "pct", "home/root", "home/labuser"):
        (STATE / name).mkdir(parents=True)
    mount("--bind", settings["disk"], str(STATE / "disk"))
    mount("--bind", "/usr", str(STATE / "host-usr"))
    mount("--bind", str(Path(sys.executable).parents[1]), str(STATE / "python"))
    overlay("/usr", str(STATE / "host-usr"))
    overlay("/etc", "/etc")
    if settings["cgroup_v2"]:
        mount("-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
        scope = Path("/sys/fs/cgroup/init.scope")
        scope.mkdir()
        (scope / "cgroup.procs").write_text("0")
        return
    mount("-t", "tmpfs", "-o", "mode=755", "cgroup", "/sys/fs/cgroup")
    for name, controllers in settings["cgroup_v1"]:
        (Path("/sys/fs/cgroup") / name).mkdir()
        mount("-t", "cgroup", "-o", controllers, "cgroup", f"/sys/fs/cgroup/{name}")


def write_files(files: dict[str, list[Any]]) -> None:
    """Write what the session asks for: path -> [mode, text]; parents are made."""
    for name, (mode, text) in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)


def reap(*_: object) -> None:
    """Collect every child that ended: orphans of the whole node become ours."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def thaw_all() -> None:
    """Let frozen containers die with us: in cgroup v1 a frozen process does not even take SIGKILL."""
    for state in Path("/sys/fs/cgroup/freezer").rglob("freezer.state"):
        with contextlib.suppress(OSError):
            state.write_text("THAWED")


def main() -> None:
    """Set up, report on stdout, then wait for the end of stdin."""
    os.umask(0o022)
    # Still the machine's /proc, so this is our pid as the test session sees it.
    outer_pid = int(Path("/proc/self").readlink().name)
    settings = json.loads(sys.stdin.buffer.readline())
    make_mounts(settings)
    write_files(settings["files"])
    subprocess.run(["hostname", settings["hostname"]], check=True, timeout=20)
    os.chown(STATE / "home/labuser", settings["labuser_uid"], settings["labuser_uid"])
    log = (STATE / "disk/sshd.log").open("ab")
    sshd_pids = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log).pid for command in settings["daemons"]
    ]
    signal.signal(signal.SIGCHLD, reap)
    print(json.dumps({"outer_pid": outer_pid, "daemon_pids": sshd_pids}), flush=True)  # noqa: T201 (our reply)
    sys.stdin.buffer.read()
    thaw_all()


if __name__ == "__main__":
    main()
