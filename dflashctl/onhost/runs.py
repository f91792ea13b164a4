"""Runs on the host: start one, say what became of it, read its log."""

from __future__ import annotations

import base64
import json
import os
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dflashctl.onhost import caches
from dflashctl.onhost.entry import Fault, require_python
from dflashctl.onhost.layout import Layout, RunFolder, point_link, write_text
from dflashctl.onhost.processes import MARK, recorded_process
from dflashctl.onhost.states import LIVING, state_of

_PID_FILE_S = 15.0
_LOG_BYTES = 1 << 20
_LOOK_S = 0.1
_NEEDED = ("torch", "transformers", "safetensors", "numpy")
_PACKAGE_CHECK = """
import json
from importlib import metadata, util
missing = [name for name in %r if util.find_spec(name) is None]
torch = None if "torch" in missing else metadata.version("torch")
print(json.dumps({"missing": missing, "torch": torch}))
"""


def launch(args: dict[str, Any]) -> dict[str, Any]:
    """Claim a run folder, write what the run is, start it detached, and watch its start-up window.

    `args`: root, tag, launch_id, release, python, env, config, record, cache ("own" or "warm"), gpu_model, clear_cache,
    startup_s, log_lines, minimum_python.
    """
    require_python(args["minimum_python"])
    layout = Layout(args["root"])
    torch = _check_packages(args["python"], args["env"])
    cleared = str(caches.clear_default_cache({**os.environ, **args["env"]})) if args["clear_cache"] else None
    with layout.lock():
        folder = _prepare(layout, args, torch)
        warning = _link_log(layout, folder, args["tag"])
    started = time.monotonic()
    subprocess.run(["/bin/sh", str(folder.script)], check=True, timeout=_PID_FILE_S)
    _await_pid(folder)
    report = _watch_start(folder, args["startup_s"])
    lines, offset = _last_lines(folder.log, args["log_lines"])
    watched = round(time.monotonic() - started, 3)
    return {
        **report,
        "run_dir": str(folder.path),
        "log": str(folder.log),
        "lines": lines,
        "offset": offset,
        "watched_s": watched,
        "warning": warning,
        "cleared_cache": cleared,
    }


def _check_packages(python: str, env: dict[str, str]) -> str:
    """Refuse an interpreter without the trainer's packages; returns the version of torch."""
    command = [python, "-c", _PACKAGE_CHECK % (_NEEDED,)]
    found = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, cwd="/")
    if found.returncode != 0:
        raise Fault("environment", f"{python} cannot look up its packages: {(found.stderr.strip() or '?').splitlines()[-1]}")
    answer = json.loads(found.stdout)
    if answer["missing"]:
        names = ", ".join(answer["missing"])
        packages = "'torch>=2.11' 'transformers>=5.15,<5.20' safetensors numpy"
        hint = f"install them for that interpreter: {python} -m pip install {packages}"
        raise Fault("environment", f"no {names} at {python}", hint, missing=answer["missing"])
    return answer["torch"] or "unknown"


def _prepare(layout: Layout, args: dict[str, Any], torch: str) -> RunFolder:
    release = layout.release(args["release"])
    if not release.is_dir():
        raise Fault("environment", f"release {args['release']} is not on the host", "deploy first")
    shared = caches.warm_cache(layout, args["release"], torch, args["gpu_model"]) if args["cache"] == "warm" else None
    folder = layout.claim_run(args["tag"])
    cache = shared or folder.cache
    record = {
        **args["record"],
        "run": folder.run,
        "tag": args["tag"],
        "launch_id": args["launch_id"],
        "release": args["release"],
        "torch": torch,
        "cache": str(cache),
        "launched_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_text(folder.config, json.dumps(args["config"], indent=1) + "\n")
    write_text(folder.script, _script(folder, args, release, cache, own_cache=shared is None))
    folder.script.chmod(0o755)
    write_text(folder.record_path, json.dumps(record, indent=1) + "\n")
    return folder


def _script(folder: RunFolder, args: dict[str, Any], release: Path, cache: Path, own_cache: bool) -> str:
    """run.sh: the exact command with everything it needs, so that started by hand it does the same."""
    env = {
        **args["env"],
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(release), args["env"].get("PYTHONPATH")])),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        MARK: args["launch_id"],
    }
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(env.items()))
    clean = f"rm -rf -- {shlex.quote(str(folder.cache))}\n" if own_cache else ""
    return _TEMPLATE.format(
        run=folder.run,
        folder=shlex.quote(str(folder.path)),
        exports=exports,
        release=shlex.quote(str(release)),
        python=shlex.quote(args["python"]),
        clean=clean,
    )


# The wrapper ignores TERM so that it outlives the trainer by the moment it takes to write the exit code; the trainer gets
# the default back (a trap with a command is not inherited, an ignored HUP is).
_TEMPLATE = """#!/bin/sh
# Run {run}. By hand: `sh run.sh` returns at once; train.log grows; a run that lives is not started twice.
set -u
cd {folder} || exit 1
start_time() {{ sed 's/^.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }}
if [ "${{1-}}" != detached ]; then
    if [ -r pid ] && [ ! -e exit_code ]; then
        read -r pid start init <pid
        if [ -n "$start" ] && [ "$(start_time "$pid")" = "$start" ] && [ "$(start_time 1)" = "$init" ]; then
            echo "{run} is running, pid $pid" >&2
            exit 1
        fi
    fi
    setsid /bin/sh ./run.sh detached </dev/null >/dev/null 2>&1 &
    exit 0
fi
trap '' HUP
trap : TERM INT
exec >>train.log 2>&1
rm -f exit_code stopped
echo "$$ $(start_time $$) $(start_time 1)" >pid.tmp && mv pid.tmp pid
{exports}
config=$PWD/config.json
cd {release} && {python} -m trainer "$config"
code=$?
cd {folder}
{clean}echo "$code" >exit_code.tmp && mv exit_code.tmp exit_code
exit "$code"
"""


def _link_log(layout: Layout, folder: RunFolder, tag: str) -> str | None:
    """Point train_<tag>.log at this run's log; an ordinary file of that name is somebody's log and stays."""
    folder.log.touch()
    link = layout.log_link(tag)
    if link.exists() and not link.is_symlink():
        return f"{link} is an ordinary file and was left alone; this run's log is {folder.log}"
    point_link(link, os.path.relpath(folder.log, link.parent))
    return None


def _await_pid(folder: RunFolder) -> None:
    deadline = time.monotonic() + _PID_FILE_S
    while not folder.pid.exists():
        if time.monotonic() > deadline:
            raise Fault("environment", f"{folder.run}: no pid file after {_PID_FILE_S:.0f} s", f"look at {folder.log}")
        time.sleep(0.02)


def _watch_start(folder: RunFolder, startup_s: float) -> dict[str, Any]:
    """The run's state when it ends or when the start-up window is over, whichever comes first."""
    deadline = time.monotonic() + startup_s
    while time.monotonic() < deadline and not folder.exit_code.exists() and recorded_process(folder.pid):
        time.sleep(0.05)
    return state_of(folder)


def peek(args: dict[str, Any]) -> dict[str, Any]:
    """State of one run and what its log holds from `offset` on (None: from its last `lines` lines), 1 MiB at most.

    Waits up to `wait_s` for something new or for the run's end, so that following a log costs a call only now and then.
    Answers `state`, `record`, `data` (base64), `offset` (where to go on), `log`.
    """
    folder = Layout(args["root"]).find_run(args["run"])
    offset = args["offset"]
    if offset is None:
        offset = _last_lines(folder.log, args["lines"])[1]
    deadline = time.monotonic() + args["wait_s"]
    while True:
        state = state_of(folder)  # before the log: what a dead run wrote last is then surely read
        size = folder.log.stat().st_size if folder.log.exists() else 0
        offset = 0 if size < offset else offset  # truncated in place: begin again
        if size > offset or state["state"] not in LIVING or time.monotonic() > deadline or _listener_left(_LOOK_S):
            break
    data = _read(folder.log, offset, _LOG_BYTES) if size > offset else b""
    return {
        "state": state,
        "record": folder.record(),
        "data": base64.b64encode(data).decode(),
        "offset": offset + len(data),
        "log": str(folder.log),
    }


def _listener_left(wait_s: float) -> bool:
    """Waits; True as soon as standard input ends: whoever asked is gone, and nobody needs the answer."""
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


def list_runs(args: dict[str, Any]) -> dict[str, Any]:
    """Every run under the root, with its record and state."""
    return {"runs": [{"record": f.record(), "state": state_of(f)} for f in Layout(args["root"]).all_runs()]}


def _read(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def _last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last `count` lines within the last MiB, and the offset at which they begin."""
    try:
        size = path.stat().st_size
    except OSError:
        return [], 0
    start = max(0, size - _LOG_BYTES)
    data = _read(path, start, size - start)
    ends = [i for i, byte in enumerate(data[:-1]) if byte == 10]
    begin = ends[-count] + 1 if 0 < count <= len(ends) else (len(data) if count == 0 else 0)
    return data[begin:].decode(errors="replace").splitlines(), start + begin


VERBS = {"launch": launch, "peek": peek, "list": list_runs}
