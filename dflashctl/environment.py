"""The trainer's environment on a host: which interpreters there are, what the trainer needs, and how to get it there."""

import re
import shlex
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Final

from dflashctl.errors import EnvironmentFault
from dflashctl.session import MINIMUM_PYTHON, HostSession

PINS: Final = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "safetensors": "0.8.0",
    "numpy": "2.4.6",
    "gguf": "0.19.0",
    "accelerate": "1.15.0",
}
"""What `setup` installs: the versions that the tests run with."""

_SETUP_S = 3600.0
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)([^;]*);\s*extra == .trainer.")
_PYTHONS = """
for p in {ours} {venv} /usr/local/bin/python3 /usr/bin/python3 /opt/conda/bin/python3 python3.13 python3.12 python3.11; do
  p=$(command -v "$p") || continue
  v=$(timeout 20 "$p" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) && echo "$v $p"
done
:
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What setup made or found in place."""

    host: str
    python: str
    """What hosts.yaml should name."""
    fingerprint: str
    packages: dict[str, str | None]
    made: bool
    tool: str | None
    pruned: list[str]
    is_named: bool
    """hosts.yaml names it already."""

    def document(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def setup(session: HostSession) -> Environment:
    """Make the host's root/venv the environment of PINS; raises EnvironmentFault, what was there before still in place."""
    host = session.host
    found = {p: v for p, v in pythons(session).items() if not p.startswith((f"{host.root}/venv/", f"{host.root}/venvs/"))}
    base = next((path for path, version in found.items() if release(version) >= release(MINIMUM_PYTHON)), None)
    if base is None:
        seen = ", ".join(f"{path} {version}" for path, version in found.items()) or "none"
        raise EnvironmentFault(f"host {host.name} has no python {MINIMUM_PYTHON} or newer; found: {seen}", hint="install one")
    request = {
        "root": host.root,
        "base": base,
        "pins": [f"{name}=={version}" for name, version in PINS.items()],
        "env": dict(host.env),
    }
    answer = session.call("environment", "setup", request, timeout_s=_SETUP_S, python=base)
    return Environment(host=host.name, is_named=host.python == answer["python"], **answer)


def requirements() -> dict[str, str]:
    """The trainer's packages and the versions that it takes, as this package's own metadata names them."""
    found = (_REQUIREMENT.match(line) for line in metadata.requires("dflashctl") or ())
    return {match[1]: match[2].strip() for match in found if match}


def pythons(session: HostSession) -> dict[str, str]:
    """Interpreters of a host by path, with their versions: its own, setup's, then those where people have them."""
    places = {"ours": shlex.quote(session.host.python), "venv": shlex.quote(f"{session.host.root}/venv/bin/python")}
    done = session.script(_PYTHONS.format(**places), timeout_s=180)
    lines = done.stdout.decode(errors="replace").splitlines()
    return {path: version for version, _, path in (line.partition(" ") for line in lines) if release(version)}


def release(version: str) -> tuple[int, ...]:
    """3.11.2 as numbers."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())
