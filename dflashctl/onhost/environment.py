"""The trainer's interpreter on its host: make it, say what is installed for it, and a fingerprint that each run keeps."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, Iterator

from dflashctl.onhost.entry import Fault
from dflashctl.onhost.layout import Layout, point_link, write_text
from dflashctl.onhost.states import MAY_LIVE, state_of

NEEDED = ("torch", "transformers", "safetensors", "numpy")
"""Without these no run starts; gguf and accelerate are for GGUF targets."""

_LOOK_S = 60.0
_STEP_S = 1700.0
_MARKER = "fingerprint.json"
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s")
_PROGRAM = """
import json, sys
from importlib import metadata, util
packages = {}
for found in metadata.distributions():
    if found.metadata["Name"]:
        packages.setdefault(found.metadata["Name"].lower(), found.version)  # what lies first on the path is imported
missing = [name for name in %r if util.find_spec(name) is None]
print(json.dumps({"python": "%%d.%%d.%%d" %% sys.version_info[:3], "packages": packages, "missing": missing}))
"""


def look(python: str, env: dict[str, str]) -> dict[str, Any]:
    """What `python` has: `python`, `packages` {name: version}, `missing` of NEEDED, `driver` (None without one), `fingerprint`.

    Nothing is imported, so it costs no import of torch. Raises Fault where the interpreter fails.
    """
    command = [python, "-c", _PROGRAM % (NEEDED,)]
    found = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=_LOOK_S, cwd="/")
    if found.returncode != 0:
        raise Fault("environment", f"{python} cannot look up its packages: {(found.stderr.strip() or '?').splitlines()[-1]}")
    answer: dict[str, Any] = json.loads(found.stdout)
    answer["driver"] = driver()
    parts = {key: answer[key] for key in ("python", "packages", "driver")}
    return {**answer, "fingerprint": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]}


def driver() -> str | None:
    """Version of the NVIDIA kernel module; None where there is none, or its file says nothing that we know."""
    try:
        match = _DRIVER_VERSION.search(_DRIVER.read_text(errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def require(python: str, env: dict[str, str]) -> dict[str, Any]:
    """`look`, refused without the packages that every run needs."""
    answer = look(python, env)
    if answer["missing"]:
        names = ", ".join(answer["missing"])
        packages = "'torch>=2.11' 'transformers>=5.15,<5.20' safetensors numpy"
        hint = f"dflashctl setup makes an environment with them, or: {python} -m pip install {packages}"
        raise Fault("environment", f"no {names} at {python}", hint, missing=answer["missing"])
    return answer


def settled(python: str) -> str:
    """The same interpreter by the folder that its environment really is: a later setup moves `venv`, not a run's floor."""
    folder = Path(python).parent.parent
    return str(folder.resolve() / "bin" / Path(python).name) if folder.is_symlink() else python


def changed(python: str, now: dict[str, Any]) -> list[str]:
    """What is no longer as setup left it; nothing where the environment is not one of setup's."""
    try:
        then = json.loads((Path(settled(python)).parent.parent / _MARKER).read_text())
        before = {"python": then["python"], "NVIDIA driver": then["driver"], **then["packages"]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    after = {"python": now["python"], "NVIDIA driver": now["driver"], **now["packages"]}
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [f"{name} was {before.get(name) or 'not there'}, is {after.get(name) or 'not there'}" for name in names]


def setup(args: dict[str, Any]) -> dict[str, Any]:
    """Make root/venv an environment with `pins` ["torch==2.13.0", ...] from interpreter `base`; `env` reaches pip or uv.

    It is built under root/venvs, by the name of what it holds, and root/venv is swapped to it once it is whole; older ones go
    when no living run works in them. Answers python, fingerprint, packages, made, tool, pruned.
    """
    layout = Layout(args["root"])
    place = layout.root / "venvs"
    place.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(json.dumps(args["pins"]).encode()).hexdigest()[:12]
    folder = place / name
    with _alone(place / ".lock"):
        tool = "uv" if shutil.which("uv") else "pip"
        made = not _is_whole(folder, args["pins"])
        if made:
            if _is_used(layout, folder):
                raise Fault(
                    "environment", f"{folder} is not as it was made, and a living run works in it", "stop the run first"
                )
            _build(folder, tool, args)
        answer = look(str(folder / "bin/python"), {})
        if made:
            write_text(folder / _MARKER, json.dumps({**answer, "pins": args["pins"]}, indent=1) + "\n")
        point_link(layout.root / "venv", f"venvs/{name}")
        with layout.lock():  # a launch claims its run under it: one that came meanwhile is seen, one that comes later sees
            old = [path for path in place.iterdir() if path.is_dir() and path != folder]
            pruned = [path for path in old if not _is_used(layout, path)]
            for path in pruned:
                os.rename(path, path.with_name(f".{path.name}"))
        for path in place.glob(".*/"):
            shutil.rmtree(path, ignore_errors=True)
    wanted = [pin.partition("==")[0] for pin in args["pins"]]
    return {
        "python": str(layout.root / "venv/bin/python"),
        "fingerprint": answer["fingerprint"],
        "packages": {name: answer["packages"].get(name) for name in wanted},
        "made": made,
        "tool": tool if made else None,
        "pruned": [path.name for path in pruned],
    }


def _is_used(layout: Layout, folder: Path) -> bool:
    """Whether a living run works in that environment."""
    pythons = [str(run.record().get("python")) for run in layout.all_runs() if state_of(run)["state"] in MAY_LIVE]
    return any(python.startswith(f"{folder}/") for python in pythons)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fault("timeout", f"another setup is under way in {path.parent}", "wait until it has ended") from None
        yield


def _is_whole(folder: Path, pins: list[str]) -> bool:
    """Whether an environment was finished and still holds its pins."""
    if not (folder / _MARKER).is_file():
        return False
    try:
        packages = look(str(folder / "bin/python"), {})["packages"]
    except (Fault, OSError, ValueError, subprocess.TimeoutExpired):
        return False
    return all(packages.get(name, "").split("+")[0] == version for name, _, version in (pin.partition("==") for pin in pins))


def _build(folder: Path, tool: str, args: dict[str, Any]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    python = str(folder / "bin/python")
    if tool == "uv":
        steps = [["uv", "venv", "--python", args["base"], str(folder)], ["uv", "pip", "install", "--python", python]]
    else:
        steps = [[args["base"], "-m", "venv", str(folder)], [python, "-m", "pip", "install", "--no-input"]]
    steps[1] += args["pins"]
    log = folder.parent / "setup.log"
    log.write_text("")
    for argv in steps:
        code = _logged(argv, {**os.environ, **args["env"]}, log)
        if code != 0:
            shutil.rmtree(folder, ignore_errors=True)
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            cause = next((line for line in said if "ensurepip is not" in line), said[-1] if said else "it said nothing")
            hint = f"{log} has all of it" + ("; install python3-venv, or uv" if "ensurepip" in cause else "")
            raise Fault("environment", f"`{shlex.join(argv[:4])} ...` failed: {cause[:300]}", hint)


def _logged(argv: list[str], env: dict[str, str], log: Path) -> int:
    with open(log, "a") as output:
        try:
            done = subprocess.run(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=_STEP_S, cwd="/", check=False
            )
        except subprocess.TimeoutExpired:
            output.write(f"it was ended after {_STEP_S:.0f} s\n")
            return 1
    return done.returncode


VERBS = {"setup": setup}
