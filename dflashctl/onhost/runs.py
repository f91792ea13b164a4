"""Runs on the host: start one, list them, find one by its launch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from dflashctl.onhost import caches, environment, leases, secrets, wrapper
from dflashctl.onhost.entry import Fault, require_python
from dflashctl.onhost.layout import Layout, RunFolder, point_link, write_text
from dflashctl.onhost.logs import last_lines
from dflashctl.onhost.processes import family, recorded_process
from dflashctl.onhost.states import LIVING, UNKNOWN, state_of

_PID_FILE_S = 15.0
_FIND_S = 30.0
_TRAINS = ("trainer", "trainer.smoke")


def launch(args: dict[str, Any]) -> dict[str, Any]:
    """Claim a run folder, write what the run is, start it detached, and watch its start-up window.

    `args`: root, tag, launch_id, release, python, module, arguments, env, resume, retries, secrets, config, record, cache
    ("own" or "warm"), gpu_model, clear_cache, startup_s, log_lines, force, minimum_python.
    """
    require_python(args["minimum_python"])
    layout = Layout(args["root"])
    args = {**args, "python": environment.settled(args["python"])}
    installed = environment.require(args["python"], args["env"])
    cleared = str(caches.clear_default_cache({**os.environ, **args["env"]})) if args["clear_cache"] else None
    with layout.lock(), leases.turn(args["record"]["gpus"]):
        layout.refuse_withdrawn(args["launch_id"])
        if not Path(args["python"]).exists():
            raise Fault("environment", f"{args['python']} has just been replaced by a setup", "launch again")
        if args["module"] in _TRAINS:
            _refuse_missing(layout, args["config"])
        args["config"]["run"]["resume"] = _checkpoint(layout, args["resume"]) or args["config"]["run"]["resume"]
        if args["retries"]:
            _refuse_retry(layout, layout.find_run(args["retries"]["run"], args["retries"]["launch_id"]))
        overridden = leases.held(layout, args["record"]["gpus"])
        if overridden and not args["force"]:
            raise leases.refusal(overridden)
        folder = _prepare(layout, args, installed, {lease.uuid for lease in overridden})
        started = time.monotonic()
        _start(layout, folder, args["record"]["gpus"])
        _await_pid(folder)
        warning = _link_log(layout, folder, args["tag"])
    report = _watch_start(folder, args["startup_s"])
    lines = last_lines(folder, args["log_lines"])
    watched = round(time.monotonic() - started, 3)
    return {
        **report,
        "run_dir": str(folder.path),
        "log": str(folder.log),
        "lines": lines,
        "watched_s": watched,
        "warning": warning,
        "cleared_cache": cleared,
        "overridden": [lease.sentence() for lease in overridden],
    }


def _refuse_missing(layout: Layout, config: dict[str, Any]) -> None:
    """Raise Fault for shards and a target that are not there: the trainer would say so after half a minute of imports."""
    data = layout.root / config["data"]["path"]
    if not data.is_dir():
        hint = "dflashctl prepare makes an experiment's data, dflashctl push sends shards"
        raise Fault("config", f"data.path must be a folder of shards, got {config['data']['path']}: there is no {data}", hint)
    target, gguf = config["target"]["path"], config["target"]["gguf_file"]
    if gguf and (layout.root / target).is_dir() and not (layout.root / target / gguf).is_file():
        raise Fault("config", f"target.gguf_file must be a file in {layout.root / target}, got {gguf}")
    if (layout.root / target.split("/")[0]).is_dir() and not (layout.root / target).is_dir():  # else it may be a hub id
        hint = "dflashctl push sends a target model"
        raise Fault(
            "config", f"target.path must be a folder or a hub id, got {target}: there is no {layout.root / target}", hint
        )


def _checkpoint(layout: Layout, resume: dict[str, str] | None) -> str | None:
    """The newest checkpoint of the run that is to be resumed, relative to the root; raises Fault where it has none."""
    if resume is None:
        return None
    parent = layout.find_run(resume["run"], resume["launch_id"])
    told = state_of(parent)
    state = told["state"]
    if state == UNKNOWN:
        raise Fault("environment", f"whether run {parent.run} still lives is not known: its files may not be read by this user")
    if state in LIVING:
        raise Fault(
            "environment",
            f"run {parent.run} is still living",
            f"dflashctl tail {parent.run} follows it, dflashctl stop {parent.run} ends it",
        )
    if left := family(None, parent.launch_id()):  # its trainer may train on when only its wrapper was killed
        raise Fault(
            "environment",
            f"run {parent.run} has ended, but pid {left[0].pid} ({left[0].name}) of it lives",
            f"dflashctl stop {parent.run} ends what it has left",
        )
    if told["last_event"] == "finished" or _is_trained(parent):
        raise Fault("environment", f"run {parent.run} has finished all its steps, and keeps nothing to go on from")
    grandparent = parent.record().get("resumes")
    hint = f"dflashctl launch --resume {grandparent} goes on from where it had begun" if grandparent else None
    return _required_checkpoint(layout, parent, hint)


def _refuse_retry(layout: Layout, dead: RunFolder) -> None:
    """Raise Fault where `dead` was stopped, also after its death, or another run goes on from it; the lock is held."""
    for mark in (dead.stopped, dead.no_retries):
        if mark.exists():
            raise Fault("retry_refused", f"{dead.run} was stopped by {mark.read_text().strip() or 'somebody'}")
    for other in layout.all_runs():
        record = other.record()
        if dead.run in (record.get("resumes"), record.get("retries")):
            raise Fault("retry_refused", f"{other.run} goes on from {dead.run} already", f"dflashctl tail {other.run}")


def check_retry(args: dict[str, Any]) -> dict[str, Any]:
    """Raise the Fault that `launch` would for a retry of a run (`root`, `run`, `launch_id`)."""
    layout = Layout(args["root"])
    with layout.lock():
        _refuse_retry(layout, layout.find_run(args["run"], args["launch_id"]))
    return {}


def _required_checkpoint(layout: Layout, folder: RunFolder, hint: str | None = None) -> str:
    newest = _newest_checkpoint(layout, folder)
    if newest is None:
        raise Fault("environment", f"run {folder.run} has no checkpoint", hint)
    return newest


def _newest_checkpoint(layout: Layout, folder: RunFolder) -> str | None:
    """Relative to the root."""
    latest = folder.checkpoints / "latest"
    return os.path.relpath(os.path.realpath(latest), os.path.realpath(layout.root)) if latest.is_dir() else None


def _is_trained(folder: RunFolder) -> bool:
    """Whether its newest checkpoint is that of its last step, which nothing goes on from: it died, if at all, after that."""
    with contextlib.suppress(Fault, LookupError, TypeError):
        return Path(os.path.realpath(folder.checkpoints / "latest")).name == f"step-{_config(folder)['run']['steps']}"
    return False


def _start(layout: Layout, folder: RunFolder, gpus: list[dict[str, Any]]) -> None:
    """Run run.sh, which takes the leases itself, so that a start by hand holds its GPUs too."""
    done = subprocess.run(["/bin/sh", str(folder.script)], capture_output=True, text=True, timeout=wrapper.START_S)
    if done.returncode == 0:
        return
    shutil.rmtree(folder.path, ignore_errors=True)  # nothing of it has begun
    if done.returncode == wrapper.TAKEN:
        faster = leases.held(layout, gpus)
        if faster:
            raise leases.refusal(faster)
        raise Fault("gpu_busy", "a GPU was taken and given back at this moment; try again", taken=[])
    said = done.stderr.strip().splitlines()
    raise Fault("environment", f"run.sh could not start: {said[-1] if said else f'exit code {done.returncode}'}")


def _prepare(layout: Layout, args: dict[str, Any], installed: dict[str, Any], overridden: set[str]) -> RunFolder:
    torch = installed["packages"].get("torch", "unknown")
    release = layout.release(args["release"])
    if not release.is_dir():
        raise Fault("environment", f"release {args['release']} is not on the host", "deploy first")
    shared = caches.warm_cache(layout, args["release"], torch, args["gpu_model"]) if args["cache"] == "warm" else None
    folder = layout.claim_run(args["tag"])
    try:
        _write(layout, folder, args, installed, overridden, shared)
    except BaseException:  # an empty folder would be taken for a run that was lost
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return folder


def _write(
    layout: Layout,
    folder: RunFolder,
    args: dict[str, Any],
    installed: dict[str, Any],
    overridden: set[str],
    shared: Path | None,
) -> None:
    """What the run is: run.json, config.json, run.sh and its secrets."""
    cache = shared or folder.cache
    record = {
        **args["record"],
        "run": folder.run,
        "tag": args["tag"],
        "launch_id": args["launch_id"],
        "env_file": sorted(args["secrets"]),
        "resumes": args["resume"] and args["resume"]["run"],
        "retries": args["retries"] and args["retries"]["run"],
        "release": args["release"],
        "torch": installed["packages"].get("torch", "unknown"),
        "python": args["python"],
        "environment": {name: installed[name] for name in ("fingerprint", "python", "driver", "packages")},
        "cache": str(cache),
        "launched_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if args["secrets"]:
        secrets.write(folder, args["secrets"])
    write_text(folder.config, json.dumps(args["config"], indent=1) + "\n")
    taking = [gpu for gpu in args["record"]["gpus"] if gpu["uuid"] not in overridden]
    paths = [leases.path(layout, gpu) for gpu in taking]
    later = [leases.path(layout, gpu) for gpu in args["record"]["gpus"] if gpu["uuid"] in overridden]
    release = layout.release(args["release"])
    text = wrapper.script(folder, args, release, cache, own_cache=shared is None, leases=paths, later=later)
    write_text(folder.script, text)
    folder.script.chmod(0o755)
    write_text(folder.record_path, json.dumps(record, indent=1) + "\n")


def _link_log(layout: Layout, folder: RunFolder, tag: str) -> str | None:
    """Point train_<tag>.log at this run's log; an ordinary file of that name is somebody's log and stays.

    Answers what is to be said where it does not point there: the run is under way, and no fault of a link ends it.
    """
    link = layout.log_link(tag)
    if link.exists() and not link.is_symlink():
        return f"{link} is an ordinary file and was left alone; this run's log is {folder.log}"
    try:
        point_link(link, os.path.relpath(folder.log, link.parent))
    except OSError as error:
        return f"{link} does not point at {folder.log}: {error.strerror}"
    return None


def _await_pid(folder: RunFolder) -> None:
    deadline = time.monotonic() + _PID_FILE_S
    while not folder.pid.exists():
        if time.monotonic() > deadline and _given_up(folder):
            hint = f"look at {folder.log}"
            raise Fault("environment", f"{folder.run}: no pid file after {_PID_FILE_S:.0f} s; it was given up", hint)
        time.sleep(0.02)


def _given_up(folder: RunFolder) -> bool:
    """Keep a run that has no pid file yet from going on; False where it has one by now: it is under way.

    run.sh writes its pid and then looks for `stopped`; here it is the other way round, so one of the two sees the other.
    """
    write_text(folder.stopped, "given up: it did not start\n")
    if not folder.pid.exists():
        return True
    folder.stopped.unlink()
    return False


def _watch_start(folder: RunFolder, startup_s: float) -> dict[str, Any]:
    """The run's state when it ends or when the start-up window is over, whichever comes first."""
    deadline = time.monotonic() + startup_s
    while time.monotonic() < deadline and not folder.exit_code.exists() and recorded_process(folder.pid):
        time.sleep(0.05)
    return state_of(folder)


def trained(args: dict[str, Any]) -> dict[str, Any]:
    """`config` of a run and its newest `checkpoint`, relative to the root; raises Fault where it has none."""
    layout = Layout(args["root"])
    folder = layout.find_run(args["run"], args["launch_id"])
    return {"config": _config(folder), "checkpoint": _required_checkpoint(layout, folder)}


def settings(args: dict[str, Any]) -> dict[str, Any]:
    """`config` of a run, and `origins` {section.key: where it came from} of what was set."""
    folder = Layout(args["root"]).find_run(args["run"], args["launch_id"])
    return {"config": _config(folder), "origins": folder.record().get("origins") or {}}


def _config(folder: RunFolder) -> Any:
    try:
        return json.loads(folder.config.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise Fault("environment", f"{folder.config} cannot be read: {error}") from None


def checkpoint(args: dict[str, Any]) -> dict[str, Any]:
    """The newest `checkpoint` that a run has written, relative to the root (None: none), and whether it `is_last` of all."""
    layout = Layout(args["root"])
    folder = layout.find_run(args["run"], args["launch_id"])
    return {"checkpoint": _newest_checkpoint(layout, folder), "is_last": _is_trained(folder)}


def check_preparation(args: dict[str, Any]) -> dict[str, Any]:
    """Raise Fault where `output` is there or being made already, or one of `inputs` is not; all relative to the root."""
    root = Path(args["root"])
    output = root / args["output"]
    if os.path.lexists(output):
        raise Fault("config", f"{output} exists already", "remove it, or set data.path to another folder")
    journal = output.with_name(f"{output.name}.regenerated.jsonl")
    if _is_locked(journal):
        raise Fault(
            "config", f"{journal} is being written by another preparation", "wait for it to end: dflashctl status --all"
        )
    missing = [path for path in args["inputs"] if not (root / path).is_file()]
    if missing:
        hint = f"dflashctl push {args['host']} FILE {missing[0]}"
        raise Fault("config", f"prepare.input must name files, got {root / missing[0]}, which is none", hint)
    return {}


def _is_locked(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or what is wrong with it is said by the run
        return False
    return False


def list_runs(args: dict[str, Any]) -> dict[str, Any]:
    """Every run under the root, with its record and state."""
    return {"runs": [_entry(folder) for folder in Layout(args["root"]).all_runs()]}


def find(args: dict[str, Any]) -> dict[str, Any]:
    """The run of one launch: `run` {record, state} or None, and then that launch is withdrawn: it will start nothing later.

    The lock is taken, so that a launch under way is not overlooked; one that has not come so far finds itself withdrawn.
    """
    layout = Layout(args["root"])
    with layout.lock(_FIND_S):
        found = [folder for folder in layout.all_runs() if folder.launch_id() == args["launch_id"]]
        if found and not found[0].pid.exists() and _given_up(found[0]):  # as whoever held the lock until now has
            found.pop()
        if not found:
            layout.withdraw(args["launch_id"])
    return {"run": _entry(found[0]) if found else None}


def _entry(folder: RunFolder) -> dict[str, Any]:
    kept = {key: value for key, value in folder.record().items() if key != "environment"}  # every package of every run
    record = {**kept, "run": folder.run, "tag": folder.run.rpartition("-")[0], "launch_id": folder.launch_id()}
    return {"record": record, "state": state_of(folder), "run_dir": str(folder.path), "log": str(folder.log)}


VERBS = {
    "launch": launch,
    "list": list_runs,
    "find": find,
    "trained": trained,
    "settings": settings,
    "checkpoint": checkpoint,
    "check_preparation": check_preparation,
    "check_retry": check_retry,
}
