"""nvidia-smi's text -> what each GPU is doing: idle, busy or unknown, and why.

A module of its own because nvidia-smi says numbers, `[N/A]`, `ERR!`, half a table or nothing at all, and each of
these has to end in a verdict that a launch can trust. Three states, after nvitop's rule that what is unknown never
becomes 0: memory in use is busy whether or not its holder can be seen (inside a container it cannot), and what cannot
be read is unknown, which refuses a launch as busy does. Pure: text in, data out; the remote layer runs
`query_script()`. Any thread may call it.

Sources: samples of real outputs in tests/dflashctl/nvidia_smi/, each with the report that it comes from.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, Literal

from dflashctl.hosts import Idle

TIMEOUT_S: Final = 15
"""nvidia-smi on a loaded host may take seconds; on a broken driver it never returns."""

# With its header line each column names itself, and whatever precedes the table is a message.
GPU_FIELDS: Final = "index,uuid,name,memory.used,memory.total,utilization.gpu,temperature.gpu,power.draw,mig.mode.current"
APP_FIELDS: Final = "gpu_uuid,pid,process_name,used_gpu_memory"
FORMAT: Final = "--format=csv,nounits"

_SCRIPT = f"""\
LC_ALL=C; export LC_ALL
smi=$(command -v nvidia-smi)
for dir in /usr/bin /usr/local/bin /usr/local/nvidia/bin /usr/lib/wsl/lib /opt/bin; do
  if [ -z "$smi" ] && [ -x "$dir/nvidia-smi" ]; then smi=$dir/nvidia-smi; fi
done
section() {{
  printf '@%s\\n' "$1"
  timeout -k 2 {TIMEOUT_S} "$smi" "$2" {FORMAT} </dev/null 2>&1
  status=$?
  printf '\\n@status %s\\n' "$status"
}}
if [ -z "$smi" ]; then
  printf '@missing\\n'
else
  section gpus --query-gpu={GPU_FIELDS}
  case $status in 124 | 137) ;; *) section apps --query-compute-apps={APP_FIELDS} ;; esac
  printf '@driver\\n'
  cat /proc/driver/nvidia/version 2>/dev/null
fi
:
"""

_INFOROM_CORRUPTED = 14
_TIMED_OUT = (124, 137)
_STATUS = re.compile(r"@status ([0-9]{1,3})")
_NUMBER = re.compile(r"[0-9]{1,15}(\.[0-9]+)?")
_LOST = re.compile(r"Unable to determine the device handle for GPU ?([0-9]{1,3}(?=: ))?:? ?([0-9A-Fa-f:.]+): (.*)")
_LIBRARY = re.compile(r"NVML library version: (\S+)")
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s")
_GARBLED = "a whole line"
"""Stands beside the first cell of a row whose cells do not fit the header."""
_FAULTS = ("requires reset", "err!", "is lost")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A compute process as the driver sees it: inside a container the pid is the hypervisor's."""

    pid: int | None
    memory_mib: int | None
    name: str | None
    """Chosen by the workload; control characters are replaced."""


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


@dataclass(frozen=True, slots=True)
class _Section:
    """What one command printed; `status` is None if it was cut off before its end."""

    lines: Sequence[str] = ()
    status: int | None = None


def query_script() -> str:
    """POSIX sh that asks nvidia-smi for GPUs and compute processes; exits 0, what went wrong is in its output.

    It takes up to twice 17 s; a process stuck in the kernel can hold it longer, so the caller keeps a time-out of its own.
    """
    return _SCRIPT


def parse_query(text: str) -> GpuReport:
    """What `query_script()` printed, as data. Never raises: what cannot be understood is an error in the report."""
    sections = _sections(text)
    if "missing" in sections:
        return GpuReport(missing=True)
    gpus = sections.get("gpus", _Section())
    if gpus.status is None:
        return GpuReport(error=f"the GPU query was cut off: {_first(gpus.lines or text.splitlines())}")
    if gpus.status in _TIMED_OUT:
        return GpuReport(
            error=f"GPU query timed out: nvidia-smi did not answer in {TIMEOUT_S} s; if it goes on, reboot the host"
        )
    rows = list(_rows(gpus.lines, "name"))
    if not rows:
        return _diagnose(gpus, sections.get("driver", _Section()))
    lost = [gpu for line in gpus.lines if (gpu := _lost(line))]
    processes = list(_rows(sections.get("apps", _Section()).lines, "process_name"))
    found = sorted([_gpu(row, processes) for row in rows] + lost, key=lambda gpu: (gpu.index is None, gpu.index))
    unexplained = gpus.status not in (0, _INFOROM_CORRUPTED) and not lost
    return GpuReport(gpus=tuple(found), error=_failed(gpus) if unexplained else None)


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
    if unread:
        return GpuState(state="unknown", reason="; ".join(unread))
    return GpuState(state="idle", reason=f"{gpu.memory_used_mib} MiB in use, utilization {gpu.utilization_percent} %")


def _busy(gpu: Gpu, idle: Idle) -> Iterable[str]:
    """Evidence that somebody uses it; memory counts even if its holder is not visible from where we look."""
    used, utilization = gpu.memory_used_mib, gpu.utilization_percent
    holders = ", ".join(_holder(process) for process in gpu.processes)
    listed = max((process.memory_mib or 0 for process in gpu.processes), default=0)
    if used is None and gpu.processes:
        yield f"memory is unknown, but it is in use by {holders}"
    elif used is not None and max(used, listed) > idle.max_memory_mib:
        yield f"{used} MiB held by {holders or 'a process that is not visible here'}"
    if utilization is not None and utilization > idle.max_utilization_percent:
        yield f"utilization is {utilization} %"


def _holder(process: GpuProcess) -> str:
    known = [process.name, None if process.memory_mib is None else f"{process.memory_mib} MiB"]
    inside = ", ".join(part for part in known if part)
    pid = "a process of unknown pid" if process.pid is None else f"pid {process.pid}"
    return f"{pid} ({inside})" if inside else pid


def _fault(gpu: Gpu) -> str | None:
    if gpu.fault:
        return gpu.fault
    for name, value in gpu.unread.items():
        if any(word in value.lower() for word in _FAULTS):
            return f"the GPU is in error ({name} reads {value}); reset it (nvidia-smi --gpu-reset) or reboot the host"
    return None


def _sections(text: str) -> dict[str, _Section]:
    lines: dict[str, list[str]] = {}
    statuses: dict[str, int] = {}
    name = ""
    for line in text.split("\n"):
        if status := _STATUS.fullmatch(line):
            statuses[name] = int(status[1])
        elif line.startswith("@"):
            name = line[1:]
            lines[name] = []
        elif name and line.strip():
            lines[name].append(line.strip())
    return {name: _Section(lines[name], statuses.get(name)) for name in lines}


def _rows(lines: Iterable[str], wide: str) -> Iterable[dict[str, str]]:
    """Rows of a CSV table by column, from its header line on; only column `wide` may hold commas itself."""
    columns: list[str] = []
    for line in lines:
        cells = line.split(", ")
        if not columns:
            columns = [cell.split(" [")[0] for cell in cells] if cells[0] in ("index", "gpu_uuid") else []
            continue
        extra = len(cells) - len(columns)
        at = columns.index(wide) if wide in columns else 0
        if extra == 0 or (extra > 0 and wide in columns):
            cells[at : at + extra + 1] = [", ".join(cells[at : at + extra + 1])]
            yield dict(zip(columns, cells, strict=True))
        elif _number(cells[0]) is not None or cells[0].startswith("GPU-"):
            yield {columns[0]: cells[0], _GARBLED: line}


def _gpu(row: Mapping[str, str], processes: Iterable[Mapping[str, str]]) -> Gpu:
    numbers = ("memory.used", "memory.total", "utilization.gpu", "temperature.gpu", "power.draw")
    values = {name: _number(row[name]) for name in numbers if name in row}
    uuid = row.get("uuid")
    garbled = f"nvidia-smi's line for it cannot be read: {_shown(row[_GARBLED])}" if _GARBLED in row else None
    return Gpu(
        fault=garbled,
        index=_whole(_number(row.get("index", ""))),
        uuid=uuid,
        name=_name(row.get("name")),
        memory_used_mib=_whole(values.get("memory.used")),
        memory_total_mib=_whole(values.get("memory.total")),
        utilization_percent=_whole(values.get("utilization.gpu")),
        temperature_c=_whole(values.get("temperature.gpu")),
        power_w=values.get("power.draw"),
        mig={"Enabled": True, "Disabled": False}.get(row.get("mig.mode.current", "")),
        processes=tuple(_process(app) for app in processes if uuid and app.get("gpu_uuid") == uuid),
        unread={name: _shown(row[name]) for name, value in values.items() if value is None},
    )


def _process(row: Mapping[str, str]) -> GpuProcess:
    return GpuProcess(
        pid=_whole(_number(row.get("pid", ""))),
        memory_mib=_whole(_number(row.get("used_gpu_memory", ""))),
        name=_name(row.get("process_name")),
    )


def _lost(line: str) -> Gpu | None:
    if not (match := _LOST.match(line)):
        return None
    index, address, cause = match.groups()
    fault = f"the GPU at {address} does not answer ({_shown(cause)}); reset it (nvidia-smi --gpu-reset) or reboot the host"
    return Gpu(index=int(index) if index else None, uuid=None, name=None, fault=fault)


def _diagnose(gpus: _Section, driver: _Section) -> GpuReport:
    """What a query without a table means."""
    text = "\n".join(gpus.lines)
    if "No devices were found" in text:
        return GpuReport()
    if "version mismatch" in text:
        library = match[1] if (match := _LIBRARY.search(text)) else "unknown"
        module = match[1] if (match := _DRIVER.search(" ".join(driver.lines) + " ")) else "unknown"
        return GpuReport(
            error=f"the NVIDIA kernel module ({module}) and nvidia-smi's library ({library}) differ in version; "
            "install the same version on both sides, or reboot after a driver upgrade"
        )
    for words, sentence in _SENTENCES:
        if words in text:
            return GpuReport(error=sentence)
    return GpuReport(error=_failed(gpus))


_SENTENCES = (
    (
        "couldn't communicate with the NVIDIA driver",
        "nvidia-smi cannot reach the NVIDIA driver; load or install it on the machine that has the GPUs",
    ),
    (
        "Failed to initialize NVML: Unknown Error",
        "nvidia-smi may not open the GPUs any more (NVML: Unknown Error, as after a daemon-reload on the container's "
        "host); restart the container once no run is left in it: runs that hold their GPUs go on",
    ),
)


def _failed(gpus: _Section) -> str:
    message = _first(takewhile(lambda line: not line.startswith("index, "), gpus.lines))
    if gpus.status == 0:
        return f"nvidia-smi printed no table of GPUs: {message}"
    return f"nvidia-smi failed with exit status {gpus.status}: {message}"


def _first(lines: Iterable[str]) -> str:
    return _shown(next((line for line in lines if line.strip()), "it printed no message"))


def _number(cell: str) -> float | None:
    return float(cell) if _NUMBER.fullmatch(cell) else None


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def _name(cell: str | None) -> str | None:
    return None if not cell or cell.startswith("[") else _shown(cell)


def _shown(text: str) -> str:
    """A host's text, short and without control characters."""
    plain = "".join(c if c.isprintable() else "?" for c in text.strip())
    return plain if len(plain) <= 200 else plain[:197] + "..."
