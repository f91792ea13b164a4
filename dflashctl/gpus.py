"""What each GPU of a host is doing: idle, busy or unknown, and why.

A module of its own because each answer of nvidia-smi (smi.py) has to end in a verdict that a launch can trust. Three states,
after nvitop's rule that what is unknown never becomes 0: memory in use is busy whether or not its holder can be seen (inside a
container it cannot), and what cannot be read is unknown, which refuses a launch as busy does. Pure; any thread may call it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from dflashctl.hosts import Idle

_NOBODY: Final[dict[str, Any]] = {"user": None, "container": None, "inner_pid": None, "run": None, "command": None}
_FAULTS = ("requires reset", "err!", "is lost")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A GPU that a run has reserved; `container` is set where the machine around containers was asked."""

    uuid: str
    container: int | None
    holder: str | None
    """None: whether it is held cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A compute process as the driver sees it: inside a container the pid is the hypervisor's."""

    pid: int | None
    memory_mib: int | None
    name: str | None
    """Chosen by the workload; control characters are replaced."""
    user: str | None = None
    container: int | None = None
    """The Proxmox container that it runs in, where the hypervisor was asked."""
    inner_pid: int | None = None
    """Its pid in there."""
    run: str | None = None
    """The run of ours that it belongs to."""
    command: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi shows it; None is what it did not say."""

    index: int | None
    uuid: str | None
    name: str | None
    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    mig: bool | None = None
    processes: tuple[GpuProcess, ...] = ()
    leases: tuple[Lease, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    """What stood where a number was asked for: `utilization.gpu` -> `[N/A]`."""
    fault: str | None = None
    """Why there is no row of values, as a sentence; None if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReport:
    """What a host answered."""

    gpus: tuple[Gpu, ...] = ()
    error: str | None = None
    """Why GPUs could not be read, with the remedy; the host's GPUs are then unknown."""
    missing: bool = False
    """There is no nvidia-smi."""
    leases: tuple[Lease, ...] = ()
    """Of all GPUs, also of those that are not listed."""
    doubt: str | None = None
    """What could not be asked although the GPUs could be read: who else is at them."""

    @property
    def note(self) -> str | None:
        """A sentence for a list that is empty without an error."""
        if self.gpus or self.error:
            return None
        return "there is no nvidia-smi on this host" if self.missing else "nvidia-smi finds no GPU on this host"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """The verdict on one GPU."""

    state: Literal["idle", "busy", "unknown"]
    reason: str


def joined(inside: GpuReport, around: GpuReport, container: int) -> GpuReport:
    """What a container's own nvidia-smi says, with what the machine around it knows of other containers.

    In a container the driver names no process, or one by a number that is another's there, and leases of other containers are
    not seen. Without an nvidia-smi around it (its GPUs belong to a virtual machine, say) nobody is named.
    """
    outer = {gpu.uuid: gpu.processes for gpu in around.gpus if gpu.uuid}
    foreign = [lease for lease in around.leases if lease.container != container]
    gpus = []
    for gpu in inside.gpus:
        strangers = tuple(replace(process, **_NOBODY) for process in gpu.processes)
        leases = gpu.leases + tuple(lease for lease in foreign if lease.uuid == gpu.uuid)
        gpus.append(replace(gpu, processes=outer.get(gpu.uuid or "", strangers), leases=leases))
    return replace(inside, gpus=tuple(gpus), doubt=around.error)


def judge(gpu: Gpu, idle: Idle) -> GpuState:
    """Idle, busy or unknown by `idle`'s limits, with the reason in words for people."""
    if fault := _fault(gpu):
        return GpuState(state="unknown", reason=fault)
    if gpu.mig:
        return GpuState(
            state="unknown",
            reason="MIG is enabled, and slices are not supported; turn it off (nvidia-smi -mig 0) or leave the GPU out",
        )
    busy = list(_busy(gpu, idle))
    if busy:
        return GpuState(state="busy", reason="; ".join(busy))
    unread = [
        f"{name} reads {gpu.unread[name]}" if name in gpu.unread else f"{name} was not reported"
        for name, value in (("memory.used", gpu.memory_used_mib), ("utilization.gpu", gpu.utilization_percent))
        if value is None
    ]
    if any(lease.holder is None for lease in gpu.leases):
        unread.append("whether a run holds its lease cannot be read")
    if unread:
        return GpuState(state="unknown", reason="; ".join(unread))
    return GpuState(state="idle", reason=f"{gpu.memory_used_mib} MiB in use, utilization {gpu.utilization_percent} %")


def _busy(gpu: Gpu, idle: Idle) -> Iterable[str]:
    """Evidence that somebody uses it; memory counts even if its holder is not visible from where we look."""
    used, utilization = gpu.memory_used_mib, gpu.utilization_percent
    holders = ", ".join(_holder(process) for process in gpu.processes)
    listed = max((process.memory_mib or 0 for process in gpu.processes), default=0)
    for lease in gpu.leases:
        if lease.holder:
            yield f"it is held by {lease.holder}" + ("" if lease.container is None else f" in container {lease.container}")
    if used is None and gpu.processes:
        yield f"memory is unknown, but it is in use by {holders}"
    elif used is not None and max(used, listed) > idle.max_memory_mib:
        yield f"{used} MiB held by {holders or 'a process that is not visible here'}"
    if utilization is not None and utilization > idle.max_utilization_percent:
        yield f"utilization is {utilization} %"


def _holder(process: GpuProcess) -> str:
    """`container 201, pid 4711 of root (python train.py, 70990 MiB)`, as much of it as is known."""
    memory = None if process.memory_mib is None else f"{process.memory_mib} MiB"
    what = ", ".join(part for part in (process.command or process.name, memory) if part)
    pid = process.pid if process.inner_pid is None else process.inner_pid
    words = [
        None if process.container is None else f"container {process.container}",
        process.run and f"run {process.run}",
        "a process of unknown pid" if pid is None else f"pid {pid}" + (f" of {process.user}" if process.user else ""),
    ]
    who = ", ".join(word for word in words if word)
    return f"{who} ({what})" if what else who


def _fault(gpu: Gpu) -> str | None:
    if gpu.fault:
        return gpu.fault
    for name, value in gpu.unread.items():
        if any(word in value.lower() for word in _FAULTS):
            return f"the GPU is in error ({name} reads {value}); reset it (nvidia-smi --gpu-reset) or reboot the host"
    return None
