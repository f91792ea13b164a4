"""Is this host fit for a run: each check says what it found, how to see the same by hand, and how to mend it.

Nothing is changed here, and no GPU that somebody uses is touched. Runs with whatever python the host has, for the trainer's own
may be what is wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator

from dflashctl.onhost import environment, leases
from dflashctl.onhost.entry import Fault
from dflashctl.onhost.layout import Layout
from dflashctl.onhost.processes import MARK, Process, all_processes
from dflashctl.onhost.states import MAY_LIVE, state_of

Check = Dict[str, Any]
"""name, state (ok, warning, failed, unknown), command, found, fix."""

_TORCH_S = 150.0
_COMMAND_S = 30.0
_KILLED_S = 5.0
_GIB = 1 << 30
_TOOLS = ("sh", "setsid", "flock", "timeout", "sed", "head", "cut")
_PORT = 29500  # torchrun's, unless it is told another
# below the first a run cannot be trusted to last, below the second it is worth a word
_ROOM = {"disk": (1 * _GIB, 20 * _GIB), "inodes": (10_000, 100_000)}
_LEAST_MEMORY, _LEAST_SHM, _MOST_CACHES = 8 * _GIB, 1 * _GIB, 50 * _GIB
_TRAINERS = ("train.py", "torchrun")
_TORCH = """
import json, warnings
found = {"devices": [], "error": None}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            device = {"name": torch.cuda.get_device_name(index), "error": None}
            found["devices"].append(device)
            try:
                ones = torch.ones(256, 256, device=f"cuda:{index}")
                total = (ones @ ones).sum().item()
                if total != 256 ** 3:
                    device["error"] = f"256 x 256 ones multiplied sum to {total}"
            except Exception as error:
                device["error"] = str(error)
    except Exception as error:
        found["error"] = str(error)
found["warnings"] = [str(w.message) for w in said]
print(json.dumps(found))
"""


def examine(args: dict[str, Any]) -> dict[str, Any]:
    """`checks` of this host, and `now`, its clock.

    `args`: root, python (None: none serves), env, requirements {package: "<5.20,>=5.15"}, idle (uuids of GPUs that may be
    tried), gpus (how many there are).
    """
    root, layout = Path(args["root"]), Layout(args["root"])
    checks = [_tools()]
    if args["python"]:
        checks += [*_packages(args["python"], args), _torch(args["python"], args)]
    checks += [*_disk(root), _memory(), _shm(), _port(_PORT), _leases(layout)]
    try:
        checks += [*_leftovers(layout), _caches(layout, {**os.environ, **args["env"]})]
    except OSError as error:
        found, fix = f"runs cannot be listed: {error.strerror}", f"see who owns {layout.runs}"
        checks.append(_check("leftovers", "unknown", f"ls {layout.runs}", found, fix))
    return {"checks": checks, "now": time.time()}


def _check(name: str, state: str, command: str, found: str, fix: str | None = None) -> Check:
    return {"name": name, "state": state, "command": command, "found": found, "fix": fix}


def _run(argv: list[str], limit_s: float = _COMMAND_S, env: dict[str, str] | None = None) -> tuple[int | None, str, str]:
    """Exit code (None: it outlived its time), stdout and stderr; a process that SIGKILL does not end is left behind."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=env, cwd="/", start_new_session=True
        )
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, 9)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read(1 << 20).decode(errors="replace").strip())
    return code, texts[0], texts[1]


def _last(text: str) -> str:
    return text.splitlines()[-1][:300] if text else "it said nothing"


def _tools() -> Check:
    missing = [name for name in _TOOLS if shutil.which(name) is None]
    command = f"command -v {' '.join(_TOOLS)}"
    if missing:
        return _check("tools", "failed", command, f"missing: {', '.join(missing)}", "install coreutils, util-linux and sed")
    return _check("tools", "ok", command, "all there")


def _packages(python: str, args: dict[str, Any]) -> Iterator[Check]:
    command = f"{shlex.quote(python)} -m pip list"
    try:
        found = environment.look(python, args["env"])
    except (Fault, OSError, ValueError, subprocess.TimeoutExpired) as error:
        yield _check("packages", "failed", command, str(error), "dflashctl setup makes an environment of its own")
        return
    packages = found["packages"]
    named = [f"{name} {packages.get(name, 'missing')}" for name in (*args["requirements"], "triton")]
    driver = f"driver {found['driver']}" if found["driver"] else "no NVIDIA driver"
    text = f"python {found['python']}, {', '.join(named)}, {driver}; fingerprint {found['fingerprint']}"
    wrong = [
        f"{name} must be {wanted}, got {packages.get(name, 'none')}"
        for name, wanted in args["requirements"].items()
        if not satisfies(packages.get(name), wanted)
    ]
    changed = environment.changed(python, found)
    needed = [sentence for sentence in wrong if sentence.split()[0] in environment.NEEDED]
    state = "failed" if needed else "warning" if wrong or changed else "ok"
    fix = "dflashctl setup, and the python that it names in hosts.yaml" if wrong or changed else None
    since = [f"since setup: {', '.join(changed[:10])}"] if changed else []
    yield _check("packages", state, command, "; ".join([*wrong, *since, text]), fix)


def satisfies(version: str | None, wanted: str) -> bool:
    """Whether a version meets "<5.20,>=5.15", by its release numbers; what is not there meets nothing."""
    if version is None:
        return False
    for part in filter(None, wanted.split(",")):
        match = re.match(r"\s*(<=|>=|==|!=|<|>)\s*([0-9.]+)", part)
        if match is None:
            return False
        ours, theirs = _release(version), _release(match[2])
        order = (ours > theirs) - (ours < theirs)
        if order not in {"<": (-1,), "<=": (-1, 0), "==": (0,), ">=": (0, 1), ">": (1,), "!=": (-1, 1)}[match[1]]:
            return False
    return True


def _release(version: str) -> list[int]:
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", version)
    parts = [int(part) for part in numbers.group().split(".")] if numbers else []
    while parts and parts[-1] == 0:
        parts.pop()
    return parts


def _torch(python: str, args: dict[str, Any]) -> Check:
    """Does CUDA work from torch: nvidia-smi may be content where it does not. GPUs in use are left alone."""
    idle, gpus = args["idle"], args["gpus"]
    devices = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(idle)}
    tried = f"CUDA_VISIBLE_DEVICES={devices['CUDA_VISIBLE_DEVICES']} {shlex.quote(python)} -c"
    command = f"{tried} 'import torch; [print(torch.ones(9, device=i).sum()) for i in range(torch.cuda.device_count())]'"
    code, out, errors = _run([python, "-c", _TORCH], _TORCH_S, {**os.environ, **args["env"], **devices})
    if code is None:
        fix = "a driver that hangs needs a reboot of the host; a slow disk a second try"
        return _check("torch", "failed", command, f"no answer within {_TORCH_S:.0f} s", fix)
    try:
        found = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        fix = "dflashctl setup makes an environment of its own"
        return _check("torch", "failed", command, f"torch cannot be imported: {_last(errors)}", fix)
    version = f"torch {found['torch']} (CUDA {found['cuda'] or 'none'})"
    if not gpus:
        return _check("torch", "ok", command, f"{version} can be imported; there is no GPU")
    if not idle:
        untried = f"{version} can be imported; whether CUDA works is not known: no GPU is idle, and none was tried"
        return _check("torch", "warning", command, untried, "try again once one is idle")
    wrong = [f"{device['name']}: {_first(device['error'])}" for device in found["devices"] if device["error"]]
    if found["error"]:
        wrong.insert(0, f"CUDA does not start: {_first(found['error'])}")
    elif len(found["devices"]) != len(idle):
        wrong.insert(0, f"torch sees {len(found['devices'])} of the {len(idle)} idle GPUs")
    if wrong:
        wrong += [_first(text) for text in found["warnings"][:2]]
        older = "torch's CUDA may be newer than the driver can serve: install a build for an older one, or a newer driver"
        fix = "this is a CPU build of torch: install one with CUDA" if found["cuda"] is None else _uvm() or older
        return _check("torch", "failed", command, f"{version}: {'; '.join(wrong)}", fix)
    names = ", ".join(device["name"] for device in found["devices"])
    return _check("torch", "ok", command, f"{version} has computed on the idle ones, {len(idle)} of {gpus} GPUs ({names})")


def _first(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[0][:300]


def _uvm() -> str | None:
    """What is wrong with /dev/nvidia-uvm, without which nvidia-smi works and CUDA does not; its major number is dynamic."""
    majors = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/devices").read_text().splitlines():
            number, _, name = line.strip().partition(" ")
            majors[name] = int(number) if number.isdigit() else None
    try:
        node = os.major(Path("/dev/nvidia-uvm").stat().st_rdev)
    except OSError:
        return "/dev/nvidia-uvm is not here: load nvidia-uvm (nvidia-modprobe -u -c 0) and pass it into the container"
    now = majors.get("nvidia-uvm")
    if now is not None and node != now:
        return f"/dev/nvidia-uvm has major {node}, but the driver's is {now} now: pass it into the container again"
    return None


def _df(path: Path, kind: str) -> tuple[str, dict[str, int] | None]:
    """The command, and blocks of 1 KiB or inodes: total, used, free; None where df does not say."""
    argv = ["df", f"-P{kind}", "--", str(path)]
    _, out, _ = _run(argv)
    numbers = re.findall(r"\s([0-9]+)\s+([0-9]+)\s+([0-9]+)\s", out.splitlines()[-1]) if out else []
    total, used, free = map(int, numbers[0]) if numbers else (0, 0, 0)
    return shlex.join(argv), {"total": total, "used": used, "free": free} if numbers else None


def _disk(root: Path) -> Iterator[Check]:
    here = next(path for path in (root, *root.parents) if path.exists())
    writable = os.access(here, os.W_OK | os.X_OK)
    if not here.is_dir():
        found = f"{here} is no folder"
        yield _check("root", "failed", f"ls -ld {shlex.quote(str(here))}", found, "set root in hosts.yaml to a folder")
        return
    state, found = ("ok", "writable") if writable else ("failed", "not writable, or read-only")
    made = "" if here == root else f"; {root} is made by the first deploy"
    fix = None if writable else "set root in hosts.yaml to a folder that this user may write"
    yield _check("root", state, f"test -w {shlex.quote(str(here))}", f"{here} is {found}{made}", fix)
    yield _room(here, "disk", "k")
    yield _room(here, "inodes", "i")


def _room(folder: Path, name: str, kind: str) -> Check:
    command, numbers = _df(folder, kind)
    if numbers is None:
        return _check(name, "unknown", command, "df does not say", "look at it by hand")
    if kind == "i" and numbers["total"] == 0:
        return _check(name, "ok", command, "this file system has no fixed number of them")
    unit = 1024 if kind == "k" else 1
    free, total = numbers["free"] * unit, numbers["total"] * unit
    few, fewer = _ROOM[name][1], _ROOM[name][0]
    state = "failed" if free < fewer else "warning" if free < few else "ok"
    text = f"{_size(free)} free of {_size(total)}" if kind == "k" else f"{free} free of {total}"
    fix = None if state == "ok" else "remove old runs, caches or checkpoints under root, or give it more"
    return _check(name, state, command, text, fix)


def _size(number: float) -> str:
    return f"{number / _GIB:.1f} GiB"


def _memory() -> Check:
    """What may still be had, by the kernel and by the container's limit."""
    command = "grep MemAvailable /proc/meminfo; cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.current"
    match = re.search(r"MemAvailable:\s+([0-9]+) kB", _text("/proc/meminfo"))
    if match is None:
        return _check("memory", "unknown", command, "/proc/meminfo does not say", "look at it by hand")
    available = int(match[1]) * 1024
    limits = (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    )
    for limit, usage, stat, cached in limits:
        most, used = (_text(f"/sys/fs/cgroup/{name}").strip() for name in (limit, usage))
        if most.isdigit() and used.isdigit():
            cache = re.search(rf"^{cached} ([0-9]+)$", _text(f"/sys/fs/cgroup/{stat}"), re.MULTILINE)
            available = min(available, max(0, int(most) - int(used) + (int(cache[1]) if cache else 0)))
    state = "warning" if available < _LEAST_MEMORY else "ok"
    fix = "end what uses it, or give the container more; a run without memory is killed" if state == "warning" else None
    return _check("memory", state, command, f"{_size(available)} available", fix)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _shm() -> Check:
    command, numbers = _df(Path("/dev/shm"), "k")
    fix = "mount a larger tmpfs on /dev/shm: NCCL and worker processes share memory there"
    if numbers is None:
        return _check("/dev/shm", "warning", command, "there is none", fix)
    free = numbers["free"] * 1024
    state = "warning" if free < _LEAST_SHM else "ok"
    return _check("/dev/shm", state, command, f"{_size(free)} free", fix if state == "warning" else None)


def _port(port: int) -> Check:
    command = f"ss -ltnp 'sport = :{port}'"
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _text(table).splitlines()[1:]:
            cells = line.split()
            if len(cells) > 9 and cells[3] == "0A" and int(cells[1].rpartition(":")[2], 16) == port:
                inodes.add(cells[9])
    if not inodes:
        return _check("ports", "ok", command, f"nobody listens on {port}, torchrun's own port")
    holders = [_shown(process) for process in all_processes().values() if _has_socket(process.pid, inodes)]
    who = ", ".join(holders) or "a process that is not visible here"
    fix = "end it if it is a leftover, or start torchrun with --standalone, which takes a free port; dflashctl's runs need none"
    return _check("ports", "warning", command, f"{port} is held by {who}", fix)


def _has_socket(pid: int, inodes: set[str]) -> bool:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry) in {f"socket:[{inode}]" for inode in inodes}:
                    return True
    return False


def _shown(process: Process) -> str:
    words = _text(f"/proc/{process.pid}/cmdline").replace("\0", " ").strip()
    return f"pid {process.pid} ({words[:80] or process.name})"


def _leases(layout: Layout) -> Check:
    """Who holds which GPU. A look takes the lock for no longer than it takes to see that it could be had."""
    folder = layout.leases
    command = f"lslocks | grep {shlex.quote(str(folder))}"
    held, unread = [], []
    for path in sorted(folder.glob("*")):
        try:
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(f"{path.name} by {_holder(path)}")
        except OSError as error:
            unread.append(f"{path.name} ({error.strerror})")
    if unread:
        return _check("leases", "unknown", command, f"cannot be read: {', '.join(unread)}", f"see who owns {folder}")
    return _check("leases", "ok", command, f"held: {'; '.join(held)}" if held else "no GPU is held by a run")


def _holder(lease: Path) -> str:
    note = leases.note(lease)
    return f"run {note['run']} of {note.get('by', 'somebody')} since {note.get('since', '?')}" if "run" in note else "a run"


def _leftovers(layout: Layout) -> Iterator[Check]:
    """Processes of runs that have ended, and trainers that are nobody's run here; both hold memory and GPUs."""
    folders = {folder.launch_id(): folder for folder in layout.all_runs()}
    ended: dict[str, list[str]] = {}
    foreign = []
    for process in all_processes().values():
        mark = _mark(process.pid)
        folder = folders.get(mark) if mark else None
        if folder and state_of(folder)["state"] not in MAY_LIVE:
            ended.setdefault(folder.run, []).append(_shown(process))
        elif not folder and process.pid != os.getpid() and _is_trainer(process.pid):
            foreign.append(_shown(process))
    command = f"grep -lz {MARK}= /proc/[0-9]*/environ"
    if ended:
        found = "; ".join(f"{run} has ended, but left {', '.join(names)}" for run, names in ended.items())
        yield _check("leftovers", "warning", command, found, "; ".join(f"dflashctl stop {run}" for run in ended))
    else:
        yield _check("leftovers", "ok", command, "no process of a run that has ended")
    command = "pgrep -af '[t]rain.py|[t]orchrun|-m [t]rainer'"
    if foreign:
        fix = "find out whose they are (ps -o user,lstart,args -p PID): they are no run under this root"
        yield _check("foreign", "warning", command, f"trainers of others: {', '.join(foreign[:40])}", fix)
    else:
        yield _check("foreign", "ok", command, "no other trainer is visible")


def _mark(pid: int) -> str | None:
    """The launch id in a process's environment."""
    match = re.search(rf"(?:^|\0){MARK}=([^\0]*)", _text(f"/proc/{pid}/environ"))
    return match[1] if match else None


def _is_trainer(pid: int) -> bool:
    words = _text(f"/proc/{pid}/cmdline").split("\0")
    after_m = words[words.index("-m") + 1 :][:1] if "-m" in words[:4] else []
    return any(word.split(".")[0] == "trainer" for word in after_m) or any(
        word.rpartition("/")[2] in _TRAINERS for word in words[:3]
    )


def _caches(layout: Layout, environ: dict[str, str]) -> Check:
    places = [layout.caches, *(folder.cache for folder in layout.all_runs())]
    explicit = environ.get("TORCHINDUCTOR_CACHE_DIR")
    places += [Path(explicit)] if explicit else list(Path(environ.get("TMPDIR") or "/tmp").glob("torchinductor_*"))
    places.append(Path(environ.get("TRITON_CACHE_DIR") or f"{environ.get('HOME', '/root')}/.triton/cache"))
    there = [str(path) for path in places if path.is_dir()]
    command = shlex.join(["du", "-sk", "--", *(there or [str(layout.caches)])])
    if not there:
        return _check("caches", "ok", command, "none")
    _, out, _ = _run(["du", "-sk", "--", *there])
    sizes = [(int(kib) * 1024, path) for kib, _, path in (line.partition("\t") for line in out.splitlines()) if kib.isdigit()]
    if len(sizes) < len(there):
        return _check("caches", "warning", command, f"du did not measure all of them within {_COMMAND_S:.0f} s", "look by hand")
    total = sum(size for size, _ in sizes)
    largest = ", ".join(f"{path} {_size(size)}" for size, path in sorted(sizes, reverse=True)[:3])
    state = "warning" if total > _MOST_CACHES else "ok"
    fix = "launch --clear-cache empties the default one; what is under root/caches goes by hand while no run lives"
    return _check("caches", state, command, f"{_size(total)}: {largest}", fix if state == "warning" else None)


VERBS = {"examine": examine}
