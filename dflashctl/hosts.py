"""hosts.yaml -> frozen `Host`s: where runs may go, and how each machine is reached.

A module of its own because every verb begins with a host and none may guess one. What is not in the file has one
default, spelled here; what is wrong in the file is refused with file, key, allowed and got. Reads one file and
connects to nothing; any thread may call it.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from dflashctl import strict_yaml
from dflashctl.errors import ConfigurationError

FILE_NAME: Final = "hosts.yaml"
REMOTE_PYTHON: Final = "/usr/bin/python3"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_OF_A_RUN = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """Up to where a GPU counts as idle."""

    max_memory_mib: int = 64
    max_utilization_percent: int = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """A container on the host, in which everything of ours lives and runs."""

    kind: Literal["proxmox"]
    id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine (or container on it) that can hold releases and runs."""

    name: str
    transport: Literal["local", "ssh"]
    ssh: str | None = None
    """Alias of ~/.ssh/config, or user@host[:port]; None if local."""
    container: Container | None = None
    root: str
    """Absolute folder of releases, runs, caches and data, inside the container if there is one."""
    python: str
    """Absolute path of the interpreter that runs the trainer there."""
    gpus: tuple[int, ...] | None = None
    """GPUs that may be used, by nvidia-smi's index; None: all of them."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Extra environment of a run."""
    idle: Idle = Idle()

    @property
    def place(self) -> str:
        """Where its runs are, whatever it is called: two roots named `local` are two places."""
        inside = f"{self.container.kind}-{self.container.id}:" if self.container else ""
        return f"{self.ssh or 'local'}:{inside}{self.root}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """All hosts by name."""

    path: Path | None
    """The file they came from; None: there is none, and the built-in `local` serves."""
    default: str
    hosts: Mapping[str, Host]

    def get(self, name: str) -> Host:
        """The host of that name; raises ConfigurationError with the near name or all names."""
        if name not in self.hosts:
            source = self.path.name if self.path else f"the built-in hosts (no {FILE_NAME} was found)"
            hint = strict_yaml.did_you_mean(name, self.hosts, otherwise="hosts are")
            raise ConfigurationError(f"host '{name}' is not in {source}; {hint}")
        return self.hosts[name]


def typed(target: str) -> str:
    """The `ssh` command for an alias or user@host[:port], as a person types it."""
    host, _, port = target.rpartition(":")
    return f"ssh -p {port} {host}" if host and port.isdecimal() else f"ssh {target}"


def load_hosts(environ: Mapping[str, str], cwd: Path) -> Hosts:
    """Hosts of `DFLASHCTL_HOSTS`, else of the nearest hosts.yaml in `cwd` or above, else the built-in `local`.

    Raises ConfigurationError.
    """
    cwd = cwd.absolute()
    if given := environ.get("DFLASHCTL_HOSTS"):
        return parse_hosts(cwd / given, cwd)
    for folder in (cwd, *cwd.parents):
        if os.path.lexists(folder / FILE_NAME):
            return parse_hosts(folder / FILE_NAME, cwd)
    local = Host(name="local", transport="local", root=str(cwd / ".dflash"), python=sys.executable)
    return Hosts(path=None, default="local", hosts={"local": local})


def parse_hosts(path: Path, cwd: Path) -> Hosts:
    """Hosts of one file; errors name it relative to `cwd` where they can. Raises ConfigurationError."""
    where = str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
    data = strict_yaml.load(path, where)
    strict_yaml.mapping(where, data, ("default", "hosts"))
    given = strict_yaml.mapping(f"{where}: hosts", data.get("hosts"))
    if not given:
        raise ConfigurationError(f"{where}: hosts must name at least one host, got none")
    for name in given:
        if not _NAME.fullmatch(name):
            shown = strict_yaml.shown(name)
            raise ConfigurationError(f"{where}: a host's name must be letters, digits, '.', '_' or '-', got {shown}")
    hosts = {name: _host(f"{where}: hosts.{name}", name, value, path.parent) for name, value in given.items()}
    return Hosts(path=path, default=_default(where, data.get("default"), hosts), hosts=hosts)


def _default(where: str, value: object, hosts: Mapping[str, Host]) -> str:
    if value is None and len(hosts) == 1:
        return next(iter(hosts))
    if value is None:
        raise ConfigurationError(f"{where}: default must name one of {', '.join(hosts)}, got nothing")
    name = strict_yaml.text(f"{where}: default", value)
    if name not in hosts:
        hint = strict_yaml.did_you_mean(name, hosts, otherwise="hosts are")
        raise ConfigurationError(f"{where}: default must be one of the hosts, got '{name}'; {hint}")
    return name


def _host(where: str, name: str, value: object, folder: Path) -> Host:
    keys = ("transport", "ssh", "container", "root", "python", "gpus", "env", "idle")
    given = strict_yaml.mapping(where, value, keys)
    transport = _transport(where, given)
    container = _container(f"{where}.container", given["container"]) if "container" in given else None
    # only a folder of this very machine can be meant relative to the file
    here = transport == "local" and container is None
    return Host(
        name=name,
        transport=transport,
        ssh=_ssh(f"{where}.ssh", given["ssh"]) if transport == "ssh" else None,
        container=container,
        root=_root(f"{where}.root", given.get("root"), folder if here else None),
        python=_python(f"{where}.python", given.get("python", sys.executable if here else REMOTE_PYTHON)),
        gpus=strict_yaml.gpu_indices(f"{where}.gpus", given["gpus"]) if "gpus" in given else None,
        env=_env(f"{where}.env", given.get("env")),
        idle=_idle(f"{where}.idle", given.get("idle")),
    )


def _transport(where: str, given: Mapping[str, object]) -> Literal["local", "ssh"]:
    transport = given.get("transport", "ssh" if "ssh" in given else None)
    if transport == "local" and "ssh" in given:
        raise ConfigurationError(f"{where}: transport local and ssh exclude each other; drop one")
    if transport == "ssh" and "ssh" not in given:
        raise ConfigurationError(f"{where}.ssh is required with transport ssh, got nothing")
    if transport == "local":
        return "local"
    if transport == "ssh":
        return "ssh"
    if transport is None:
        raise ConfigurationError(f"{where} needs 'ssh: ALIAS' or 'transport: local', got neither")
    raise ConfigurationError(f"{where}.transport must be local or ssh, got {strict_yaml.shown(transport)}")


def _ssh(where: str, value: object) -> str:
    destination = strict_yaml.text(where, value)
    # a leading '-' would reach ssh as an option
    if destination.startswith("-") or any(c.isspace() for c in destination):
        shown = strict_yaml.shown(destination)
        raise ConfigurationError(f"{where} must be an alias of ~/.ssh/config or user@host[:port], got {shown}")
    return destination


def _container(where: str, value: object) -> Container:
    given = strict_yaml.mapping(where, value, ("kind", "id"))
    kind = given.get("kind")
    if kind != "proxmox":
        raise ConfigurationError(f"{where}.kind must be proxmox, got {strict_yaml.shown(kind)}")
    return Container(kind="proxmox", id=strict_yaml.whole(f"{where}.id", given.get("id"), 100))


def _root(where: str, value: object, folder: Path | None) -> str:
    """The absolute root; a relative one starts from `folder`, and is refused where that is None."""
    text = strict_yaml.text(where, value)
    path = Path(text)
    if folder:
        path = path.expanduser() if text.startswith("~/") else folder / path
    # a folder that is really named ~ invites somebody to delete his home with it
    plain = os.path.normpath(path)
    if not path.is_absolute() or plain == "/" or text == "~" or "\n" in text:
        raise ConfigurationError(f"{where} must be an absolute path other than /, got {strict_yaml.shown(text)}")
    if ":" in plain:  # PYTHONPATH would be split at it, and other code run than was deployed
        raise ConfigurationError(f"{where} must be a path without ':', got {strict_yaml.shown(plain)}")
    return plain


def _python(where: str, value: object) -> str:
    text = strict_yaml.text(where, value)
    if not Path(text).is_absolute() or "\n" in text:
        raise ConfigurationError(f"{where} must be an absolute path of an interpreter, got {strict_yaml.shown(text)}")
    return text


def _env(where: str, value: object) -> dict[str, str]:
    env = {}
    for name, item in strict_yaml.mapping(where, value).items():
        if not _ENV_NAME.fullmatch(name):
            raise ConfigurationError(f"{where}: a name must be letters, digits and '_', got {strict_yaml.shown(name)}")
        if name in _OURS:
            raise ConfigurationError(f"{where}.{name} is set by launch from the GPUs it chose; use 'gpus' instead")
        env[name] = item if item == "" else strict_yaml.text(f"{where}.{name}", item)
    return env


def read_env_file(path: Path) -> dict[str, str]:
    """`NAME=VALUE` a line, quotes around a value left out; empty lines and those after `#` are passed over.

    Raises ConfigurationError, which names the line and never what stands in it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--env-file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals or not _ENV_NAME.fullmatch(name) or "\0" in value:
            raise ConfigurationError(f"{path}:{number} must be NAME=VALUE")
        if name in _OURS:
            raise ConfigurationError(f"{path}:{number}: {name} is set by launch from the GPUs it chose; use 'gpus' instead")
        if name in _OF_A_RUN or name.startswith("DFLASHCTL_"):
            raise ConfigurationError(f"{path}:{number}: {name} is what launch gives each run for itself")
        found[name] = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return found


def _idle(where: str, value: object) -> Idle:
    limits = {"max_memory_mib": None, "max_utilization_percent": 100}
    given = strict_yaml.mapping(where, value, limits)
    return Idle(**{key: strict_yaml.whole(f"{where}.{key}", item, 0, limits[key]) for key, item in given.items()})
