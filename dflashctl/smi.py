"""nvidia-smi's text -> GPUs, who is at them, and their leases.

A module of its own because nvidia-smi says numbers, `[N/A]`, `ERR!`, half a table or nothing at all. Pure: text in, data out;
the remote layer runs `query_script()`. Any thread may call it.

Sources: samples of real outputs in tests/dflashctl/nvidia_smi/, each with the report that it comes from.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final

from dflashctl.gpus import Gpu, GpuProcess, GpuReport, Lease

TIMEOUT_S: Final = 15
"""nvidia-smi on a loaded host may take seconds; on a broken driver it never returns."""

# With its header line each column names itself, and whatever precedes the table is a message.
GPU_FIELDS: Final = "index,uuid,name,memory.used,memory.total,utilization.gpu,temperature.gpu,power.draw,mig.mode.current"
APP_FIELDS: Final = "gpu_uuid,pid,process_name,used_gpu_memory"
FORMAT: Final = "--format=csv,nounits"

SAMPLES: Final = 3
"""A training process computes in bursts, and one that ends gives its memory back in steps: one look can fall in between."""

_SCRIPT = f"""\
LC_ALL=C; export LC_ALL
smi=$(command -v nvidia-smi)
for dir in /usr/bin /usr/local/bin /usr/local/nvidia/bin /usr/lib/wsl/lib /opt/bin; do
  if [ -z "$smi" ] && [ -x "$dir/nvidia-smi" ]; then smi=$dir/nvidia-smi; fi
done
tab=$(printf '\\t')
section() {{
  printf '@%s\\n' "$1"
  said=$(exec 2>&1; timeout -k 2 {TIMEOUT_S} "$smi" "$2" {FORMAT} </dev/null; exit "$?")
  status=$?
  printf '%s\\n' "$said" | sed 's/^/ /'  # what it says begins no section
  printf '\\n@status %s\\n' "$status"
}}
plain() {{ tr '\\000\\t\\n' '   ' | head -c 300; }}
whose() {{  # who a process is, for people: pid, user, container, pid in it, our run, command
  [ -r "/proc/$1/status" ] || return
  # in a namespace of its own (a container) the driver's number is another process's, unless that one is at a GPU too
  [ -n "$around" ] || [ "$(readlink /proc/self/ns/pid)" = 'pid:[4026531836]' ] ||
    ls -l "/proc/$1/fd" 2>/dev/null | grep -q /dev/nvidia || return
  container=$(sed -n 's#.*/lxc/\\([0-9]\\{{1,9\\}}\\)\\(/.*\\)\\{{0,1\\}}$#\\1#p' "/proc/$1/cgroup" 2>/dev/null | head -n 1)
  inner=$(sed -n 's/^NSpid://p' "/proc/$1/status" | tr -s '\\t' ' ' | cut -d' ' -f3)  # after ours, its container's
  run=$(tr '\\000' '\\n' <"/proc/$1/environ" 2>/dev/null | sed -n 's/^DFLASHCTL_RUN=//p' | head -n 1 | plain)
  printf '%s\\t%s\\t%s\\t%s\\t%s\\t' "$1" "$(stat -c %U "/proc/$1")" "$container" "$inner" "$run"
  plain <"/proc/$1/cmdline"
  printf '\\n'
}}
if [ -z "$smi" ]; then
  printf '@missing\\n'
else
  for look in {" ".join(str(n) for n in range(1, SAMPLES + 1))}; do
    [ "$look" = 1 ] || sleep 0.3
    section gpus --query-gpu={GPU_FIELDS}
    [ "$status" = 0 ] || break
  done
  case $status in 124 | 137) ;; *)
    section apps --query-compute-apps={APP_FIELDS}
    printf '@whose\\n'
    for pid in $(printf '%s\\n' "$said" | sed -n 's/^GPU-[^,]*, \\([0-9]\\{{1,9\\}}\\),.*/\\1/p' | sort -u | head -n 64); do
      whose "$pid"
    done ;;
  esac
  printf '@driver\\n'
  cat /proc/driver/nvidia/version 2>/dev/null
fi
"""

_LEASES = """\
printf '@leases\\n'
lease() {  # a lease, the container that its holder is in, and what it says, where it is held or cannot be read
  flock -n -s "$1" true 2>/dev/null
  case $? in
    0) return ;;
    1) state=held ;;
    *) [ -f "$1" ] || return  # who had it open has ended meanwhile
       state=unread ;;
  esac
  printf '%s\\t%s\\t%s\\t%s\\n' "$2" "$3" "$state" "$(timeout 2 head -c 1000 "$1" 2>/dev/null | plain)"
}
for file in ROOT/leases/*; do
  [ ! -f "$file" ] || lease "$file" "${file##*/}" ''
done
# those of other roots, and of containers, are seen through the processes that have them open
find /proc/[0-9]*/fd -lname '*/leases/GPU-*' 2>/dev/null | head -n 512 | while read -r open; do
  name=$(readlink "$open") process=${open%/fd/*}
  [ -f "$open" ] || continue
  in=$(sed -n 's#.*/lxc/\\([0-9]\\{1,9\\}\\)\\(/.*\\)\\{0,1\\}$#\\1#p' "$process/cgroup" 2>/dev/null | head -n 1)
  lease "$open" "${name##*/}" "$in"
done | sort -u
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


@dataclass(frozen=True, slots=True)
class _Section:
    """What one command printed; `status` is None if it was cut off before its end."""

    lines: list[str] = field(default_factory=list)
    status: int | None = None


def query_script(root: str | None) -> str:
    """POSIX sh that looks at the GPUs, at who computes on them and at their leases; exits 0, faults are in its output.

    Leases are those under `root`, and those that any process there holds open; `root` is None for the machine around a
    container. It takes up to four times 17 s; a process stuck in the kernel can hold it longer, so the caller keeps a time-out
    of its own.
    """
    return f"around={'' if root else 1}\n" + _SCRIPT + _LEASES.replace("ROOT", shlex.quote(root or "/nonexistent"))


def parse_query(text: str) -> GpuReport:
    """What `query_script()` printed, as data. Never raises: what cannot be understood is an error in the report."""
    sections = _sections(text)
    looks = [section for name, section in sections if name == "gpus"]
    others = dict(sections)
    if "missing" in others:
        return GpuReport(missing=True, leases=_leases(others))
    reports = [_parse_look(look, others, text) for look in looks] or [_parse_look(_Section(), others, text)]
    failed = next((report for report in reports if report.error or not report.gpus), None)
    return replace(failed or _worst(reports), leases=_leases(others))


def _parse_look(gpus: _Section, others: Mapping[str, _Section], text: str) -> GpuReport:
    """One table of GPUs with what was asked once."""
    if gpus.status is None:
        return GpuReport(error=f"the GPU query was cut off: {_first(gpus.lines or text.splitlines())}")
    if gpus.status in _TIMED_OUT:
        return GpuReport(
            error=f"GPU query timed out: nvidia-smi did not answer in {TIMEOUT_S} s; if it goes on, reboot the host"
        )
    rows = list(_rows(gpus.lines, "name"))
    if not rows:
        return _diagnose(gpus, others.get("driver", _Section()))
    lost = [gpu for line in gpus.lines if (gpu := _lost(line))]
    people = {fields[0]: fields for fields in _fields(others.get("whose", _Section()), 6)}
    processes = [
        (row.get("gpu_uuid"), _process(row, people)) for row in _rows(others.get("apps", _Section()).lines, "process_name")
    ]
    leases = _leases(others)
    found = sorted([_gpu(row, processes, leases) for row in rows] + lost, key=lambda gpu: (gpu.index is None, gpu.index))
    unexplained = gpus.status not in (0, _INFOROM_CORRUPTED) and not lost
    return GpuReport(gpus=tuple(found), error=_failed(gpus) if unexplained else None)


def _sections(text: str) -> list[tuple[str, _Section]]:
    """What stands between the marks, in order; a section that is asked several times stands there several times."""
    found: list[tuple[str, _Section]] = []
    for line in text.split("\n"):
        if status := _STATUS.fullmatch(line):
            found[-1:] = [(name, replace(section, status=int(status[1]))) for name, section in found[-1:]]
        elif line.startswith("@"):
            found.append((line[1:], _Section([])))
        elif found and line.strip():
            found[-1][1].lines.append(line.strip("\r\n "))
    return found


def _fields(section: _Section, count: int) -> Iterable[list[str]]:
    """Lines of tab-separated fields, those with another number of fields left out."""
    for line in section.lines:
        fields = line.split("\t")
        if len(fields) == count:
            yield [_shown(field) for field in fields]


def _leases(sections: Mapping[str, _Section]) -> tuple[Lease, ...]:
    found = [_lease(*fields) for fields in _fields(sections.get("leases", _Section()), 4)]
    return tuple(dict.fromkeys(found))  # one of this root is also seen open


def _lease(uuid: str, container: str, state: str, note: str) -> Lease:
    try:
        said = json.loads(note)
    except (ValueError, RecursionError):
        said = None
    known = {key: _shown(str(value)) for key, value in said.items()} if isinstance(said, dict) else {}
    who = f"run {known['run']} of {known.get('by', 'somebody')} since {known.get('since', '?')}" if "run" in known else "a run"
    return Lease(uuid=uuid, container=_whole(_number(container)), holder=who if state == "held" else None)


def _worst(looks: Sequence[GpuReport]) -> GpuReport:
    """Of several looks the most that each GPU showed; what was not read each time, or not there, is unknown."""
    keys = dict.fromkeys(_key(gpu) for look in looks for gpu in look.gpus)
    seen = [[gpu for look in looks for gpu in look.gpus if _key(gpu) == key] for key in keys]
    return GpuReport(gpus=tuple(_worst_of(gpus, len(looks)) for gpus in seen))


def _key(gpu: Gpu) -> str:
    return gpu.uuid or f"{gpu.index} {gpu.fault}"


def _worst_of(gpus: Sequence[Gpu], looks: int) -> Gpu:
    gone = None if len(gpus) == looks else "nvidia-smi showed it at one look and not at another"
    return replace(
        gpus[-1],
        fault=next((gpu.fault for gpu in gpus if gpu.fault), gone),
        memory_used_mib=_most([gpu.memory_used_mib for gpu in gpus]),
        utilization_percent=_most([gpu.utilization_percent for gpu in gpus]),
        unread={name: value for gpu in gpus for name, value in gpu.unread.items()},
    )


def _most(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


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


def _gpu(row: Mapping[str, str], processes: Sequence[tuple[str | None, GpuProcess]], leases: Sequence[Lease]) -> Gpu:
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
        processes=tuple(process for holds, process in processes if uuid and holds == uuid),
        leases=tuple(lease for lease in leases if lease.uuid == uuid),
        unread={name: _shown(row[name]) for name, value in values.items() if value is None},
    )


def _process(row: Mapping[str, str], people: Mapping[str, Sequence[str]]) -> GpuProcess:
    known = GpuProcess(
        pid=_whole(_number(row.get("pid", ""))),
        memory_mib=_whole(_number(row.get("used_gpu_memory", ""))),
        name=_name(row.get("process_name")),
    )
    _, user, container, inner, run, command = people.get(row.get("pid", ""), [""] * 6)
    # a driver that counts pids of another namespace (inside a container) names a stranger here
    if not _is_same_program(known.name, command):
        return known
    inside = _whole(_number(container))
    return replace(
        known,
        user=user if user not in ("", "UNKNOWN") else None,
        container=inside,
        inner_pid=None if inside is None else _whole(_number(inner)),
        run=run or None,
        command=command,
    )


def _is_same_program(name: str | None, command: str) -> bool:
    if not name or not command.strip():
        return False
    one, other = (text.split()[0].rpartition("/")[2] for text in (name, command))
    return one.startswith(other) or other.startswith(one)


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
