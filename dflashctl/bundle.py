"""Deploy: pack the trainer package, ship it as one tar stream, and let the host verify, parse-check and swap it in.

What is packed is addressed by its content: the digest of the manifest names the release, so an unchanged package has nothing to
do and a damaged release on the host is noticed, because the host hashes what lies there each time.
"""

import hashlib
import io
import secrets
import tarfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import util
from pathlib import Path
from typing import Any

from dflashctl.errors import ConfigurationError, EnvironmentFault
from dflashctl.session import HostSession

_SKIPPED_FOLDERS = {"__pycache__"}
_INSTALL_S = 300.0


@dataclass(frozen=True, slots=True)
class Bundle:
    """The trainer's files as they will lie under releases/<digest>/."""

    files: Mapping[str, bytes]
    manifest: Mapping[str, str]
    digest: str


@dataclass(frozen=True, slots=True)
class ParseCheck:
    """What the host's interpreter said of the files."""

    python: str
    files: int
    errors: list[str]


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a deploy did; `release` is active unless `dry_run` says that nothing was done."""

    host: str
    release: str
    previous: str | None
    files: int
    changed: list[str]
    uploaded_bytes: int
    parse_check: ParseCheck | None
    pruned: list[str]
    dry_run: bool

    def document(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def pack(environ: Mapping[str, str]) -> Bundle:
    """The installed `trainer` package, or the package folder that DFLASHCTL_TRAINER names."""
    folder = _trainer_folder(environ)
    files = {f"trainer/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in _wanted(folder)}
    if "trainer/__main__.py" not in files:
        raise ConfigurationError(f"{folder}: no __main__.py in it, so `python -m trainer` cannot start")
    manifest = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    lines = "".join(f"{digest}  {name}\n" for name, digest in manifest.items())
    return Bundle(files, manifest, hashlib.sha256(lines.encode()).hexdigest()[:16])


def _trainer_folder(environ: Mapping[str, str]) -> Path:
    named = environ.get("DFLASHCTL_TRAINER")
    if named:
        if not Path(named).is_dir():
            raise ConfigurationError(f"DFLASHCTL_TRAINER must be a folder, got {named}")
        return Path(named).resolve()
    spec = util.find_spec("trainer")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError("the trainer package is not installed beside dflashctl; set DFLASHCTL_TRAINER")
    return Path(next(iter(spec.submodule_search_locations)))


def _wanted(folder: Path) -> list[Path]:
    """Regular files, without bytecode, hidden files and what macOS leaves (`._x.py` breaks a parse)."""
    found = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_symlink() and path.is_dir():
            raise ConfigurationError(f"{path} is a symlink to a folder; deploy ships files that lie in the package")
        hidden = any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in parts)
        if path.is_file() and not hidden and path.suffix != ".pyc":
            found.append(path)
    return found


def deploy(session: HostSession, bundle: Bundle, dry_run: bool = False) -> Deployment:
    """Make `bundle` the host's active release; raises EnvironmentFault with every parse error, the old release still active."""
    place = {"root": session.host.root, "digest": bundle.digest, "manifest": dict(bundle.manifest)}
    found = session.call("releases", "inspect", place)
    check, uploaded, pruned = found["parse_check"], 0, []
    if not dry_run and not found["intact"]:
        archive = _archive(bundle)
        uploaded = len(archive)
        request = {**place, "id": secrets.token_hex(6), "payload_bytes": uploaded}
        answer = session.call("releases", "install", request, archive, timeout_s=_INSTALL_S)
        check, pruned = answer["parse_check"], answer["pruned"]
    parse_check = ParseCheck(**check) if check else None
    deployment = Deployment(
        host=session.host.name,
        release=bundle.digest,
        previous=found["previous"],
        files=len(bundle.files),
        changed=found["changed"],
        uploaded_bytes=uploaded,
        parse_check=parse_check,
        pruned=pruned,
        dry_run=dry_run,
    )
    if parse_check and parse_check.errors:
        raise _refusal(deployment, parse_check)
    if not dry_run and found["intact"] and not found["active"]:
        session.call("releases", "activate", place)
    return deployment


def _refusal(deployment: Deployment, check: ParseCheck) -> EnvironmentFault:
    active = f"release {deployment.previous} stays active" if deployment.previous else "no release is active"
    return EnvironmentFault(
        f"host {deployment.host}: python {check.python} cannot parse {len(check.errors)} of {check.files} files; {active}\n"
        + "\n".join(check.errors),
        details=deployment.document(),
    )


def _archive(bundle: Bundle) -> bytes:
    """A tar without times, owners or modes of this machine: the same files make the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in sorted(bundle.files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
