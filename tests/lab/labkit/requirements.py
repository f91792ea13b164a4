"""What the lab needs of the machine, named by the Debian package that brings it. `setup.sh` installs the same list."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the lab looks for programs: sbin is not on every user's PATH."""

PACKAGE_OF = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "lxc-start": "lxc",
    "lxc-attach": "lxc",
    "busybox": "busybox",
    "sudo": "sudo",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}


def find_program(name: str) -> str | None:
    """Give the full path of a program, or None."""
    return shutil.which(name, path=SEARCH_PATH)


def missing() -> list[str]:
    """Say what keeps the lab from starting here, one line a thing; an empty list means that it can start."""
    packages: dict[str, list[str]] = {}
    for program, package in PACKAGE_OF.items():
        if find_program(program) is None:
            packages.setdefault(package, []).append(program)
    lines = [f"Debian package {package} (for {', '.join(names)})" for package, names in packages.items()]
    if os.geteuid() != 0:
        return [*lines, "root (namespaces, mounts and cgroups are made)"]
    if not lines and not _may_make_namespaces():
        lines.append("the right to make namespaces and mounts (CAP_SYS_ADMIN: in Docker, --privileged)")
    if not _has_cgroups():
        lines.append("a mounted cgroup hierarchy with a freezer (v1 or v2 below /sys/fs/cgroup)")
    return lines


def require() -> None:
    """Skip the test when something is missing; with CI set, fail it."""
    lacking = missing()
    if not lacking:
        return
    text = "the lab lacks: " + "; ".join(lacking) + " (tests/lab/setup.sh installs packages)"
    if os.environ.get("CI"):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


def _may_make_namespaces() -> bool:
    probe = ["unshare", "--mount", "--pid", "--cgroup", "--fork", "mount", "-t", "tmpfs", "probe", "/run"]
    return subprocess.run(probe, capture_output=True, timeout=20).returncode == 0


def _has_cgroups() -> bool:
    root = Path("/sys/fs/cgroup")
    return (root / "cgroup.controllers").exists() or (root / "freezer").is_dir()
