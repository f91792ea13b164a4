"""The lab's own corner of the cgroup file system, v1 or v2, seen from outside its namespaces.

The lab makes one cgroup of its name at the top of each hierarchy and becomes a cgroup namespace there, so containers have
the paths they have on Proxmox (/lxc/200/ns) and nothing is ever written outside that corner. Names start with PREFIX,
which is how leftovers of a killed session are found again.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labkit.deadline import wait_until

PREFIX = "dflash-lab-"
ROOT = Path("/sys/fs/cgroup")
V1_WANTED = {"memory", "freezer", "pids", "devices", "name=systemd"}
"""v1 hierarchies that the lab joins; LXC needs freezer and name=systemd where they exist."""
V2_CONTROLLERS = ("memory", "pids")
"""v2 controllers that containers get; where systemd runs they are on at the top already."""


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup hierarchy."""

    mount: Path
    controllers: str
    """The mount options that select it (`memory`, `none,name=systemd`); empty for v2."""


@dataclass(frozen=True)
class Cgroups:
    """The cgroups called `name` in every hierarchy that the lab uses."""

    name: str
    hierarchies: tuple[Hierarchy, ...]

    @property
    def is_v2(self) -> bool:
        """Whether this is the one unified hierarchy."""
        return self.hierarchies[0].controllers == ""

    def directory(self, controller: str) -> Path:
        """Give the lab's cgroup in the hierarchy of one controller."""
        for hierarchy in self.hierarchies:
            if self.is_v2 or controller in hierarchy.controllers.split(","):
                return hierarchy.mount / self.name
        raise KeyError(f"no cgroup hierarchy with {controller}")

    def create(self) -> list[Path]:
        """Make the cgroups and give their `cgroup.procs` files, for a process to write itself into."""
        for hierarchy in self.hierarchies:
            (hierarchy.mount / self.name).mkdir()
        return [hierarchy.mount / self.name / "cgroup.procs" for hierarchy in self.hierarchies]

    def enable_controllers(self) -> None:
        """Let children have limits (v2 only). The lab's own processes must have left for a child cgroup first."""
        if not self.is_v2:
            return
        top = self.hierarchies[0].mount / self.name
        for pid in (top / "cgroup.procs").read_text().split():
            (top / "init.scope/cgroup.procs").write_text(pid)
        for directory in (top.parent, top):
            control = directory / "cgroup.subtree_control"
            for controller in set(V2_CONTROLLERS) - set(control.read_text().split()):
                with contextlib.suppress(OSError):  # Not ours to give: has_memory_limit then says so.
                    control.write_text(f"+{controller}")

    @property
    def has_memory_limit(self) -> bool:
        """Whether a container's memory can be limited here."""
        if self.is_v2:
            return "memory" in (self.hierarchies[0].mount / self.name / "cgroup.subtree_control").read_text().split()
        return any("memory" in hierarchy.controllers.split(",") for hierarchy in self.hierarchies)

    def oom_kills(self, container: str) -> int:
        """Count the processes of one container that the kernel killed for memory."""
        if self.is_v2:
            counts = self.directory("memory") / f"lxc/{container}/memory.events"
        else:  # v1 counts only in the victim's own cgroup, which is the inner one.
            counts = self.directory("memory") / f"lxc/{container}/ns/memory.oom_control"
        found = re.search(r"^oom_kill (\d+)$", counts.read_text(), re.MULTILINE)
        return int(found.group(1)) if found else 0

    def remove(self) -> None:
        """Remove the cgroups once every process in them is gone; thaw first, for a frozen process cannot die in v1."""
        for top in self._tops():
            for directory, _, _ in os.walk(top):
                with contextlib.suppress(OSError):
                    if (Path(directory) / "freezer.state").exists():
                        (Path(directory) / "freezer.state").write_text("THAWED")
        wait_until(lambda: all(not _processes(top) for top in self._tops()), f"processes in {self.name} to end")
        for top in self._tops():
            wait_until(lambda top=top: _remove_tree(top), f"{top} to be removable")  # type: ignore[misc]

    def _tops(self) -> list[Path]:
        tops = [hierarchy.mount / self.name for hierarchy in self.hierarchies]
        return [top for top in tops if top.is_dir()]

    def is_occupied(self) -> bool:
        """Whether any process is in them."""
        return any(_processes(top) for top in self._tops())


def find(name: str) -> Cgroups:
    """Describe the cgroups of that name on this machine without making them."""
    if (ROOT / "cgroup.controllers").exists():
        return Cgroups(name, (Hierarchy(ROOT, ""),))
    return Cgroups(name, tuple(_mounted_v1()))


def names() -> set[str]:
    """List the labs that have cgroups on this machine, dead ones too."""
    return {path.name for mount in find("").hierarchies for path in mount.mount.glob(f"{PREFIX}*")}


def _mounted_v1() -> Iterator[Hierarchy]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, super_options = after.split(" ", 2)
        mount = Path(before.split(" ")[4])
        chosen = V1_WANTED & set(super_options.split(","))
        if kind == "cgroup" and chosen and mount.parent == ROOT:
            options = [word for word in super_options.split(",") if word not in ("rw", "ro", "xattr")]
            options = [word for word in options if not word.startswith(("release_agent", "clone_children"))]
            yield Hierarchy(mount, ",".join(["none", *options] if "name=systemd" in chosen else options))


def _processes(top: Path) -> list[str]:
    found: list[str] = []
    for directory, _, _ in os.walk(top):
        with contextlib.suppress(OSError):
            found += (Path(directory) / "cgroup.procs").read_text().split()
    return found


def _remove_tree(top: Path) -> bool:
    for directory, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            Path(directory).rmdir()
    return not top.exists()
