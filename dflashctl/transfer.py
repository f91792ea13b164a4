"""push and pull: files to a host's root, and what a run has made back to here; resumed, verified, in pieces.

Both are addressed by content. A push that broke goes on where it stopped, by the same files under the same name; a pull finds
its unfinished pieces beside the files. What a host names is checked here before any of it becomes a path.
"""

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from dflashctl.errors import ConfigurationError, EnvironmentFault
from dflashctl.runs import RunRecord
from dflashctl.session import HostSession, patiently
from dflashctl.watch import RECONNECT_S

PUSH_BYTES = 32 << 20
PULL_BYTES = 16 << 20
_HASH_S = 3600.0
_PIECE_S = 300.0
_MOST_FILES = 100_000

Tell = Callable[[str, int, int], None]
"""Told of each piece: a file's name, bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a transfer did."""

    host: str
    source: str
    dest: str
    files: int
    bytes_moved: int
    bytes_total: int

    def document(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def push(session: HostSession, source: Path, dest: str | None, tell: Tell) -> Moved:
    """A file or folder to root/`dest` (default: the name of `source`).

    Raises ConfigurationError, EnvironmentFault and what the session raises.
    """
    files = list(_local_files(source))
    if not files:
        raise ConfigurationError(f"{source} holds no file")
    dest = dest or source.resolve().name
    key = hashlib.sha256(json.dumps([dest, files]).encode()).hexdigest()[:16]
    place = {"root": session.host.root, "dest": dest, "id": key, "files": files}
    found = _patiently(session, "plan", place, _HASH_S)
    total = sum(file["size"] for file in files if file["path"] in found["offsets"])
    sent = done = 0
    for file in files:
        if file["path"] not in found["offsets"]:
            continue
        offset = found["offsets"][file["path"]]
        done += offset
        with open(source / file["path"] if file["path"] else source, "rb") as stream:
            stream.seek(offset)
            while True:
                piece = stream.read(min(PUSH_BYTES, file["size"] - offset))
                if not piece and offset < file["size"]:
                    raise EnvironmentFault(f"{stream.name} has changed while it was sent", hint="push again")
                request = {**place, "files": [], "path": file["path"], "offset": offset, "payload_bytes": len(piece)}
                _patiently(session, "put", request, _PIECE_S, piece)
                offset, sent, done = offset + len(piece), sent + len(piece), done + len(piece)
                tell(file["path"] or source.name, done, total)
                if offset >= file["size"]:
                    break
    _patiently(session, "commit", place, _HASH_S)
    return Moved(session.host.name, str(source), found["dest"], len(files), sent, sum(file["size"] for file in files))


def pull(session: HostSession, record: RunRecord, path: str, into: Path, tell: Tell) -> Moved:
    """What lies under `path` in a run's folder to `into`/<run>/; caches and secrets stay.

    Raises EnvironmentFault, RunNotFoundError and what the session raises.
    """
    run = {"root": session.host.root, "run": record.run, "launch_id": record.launch_id}
    found = _patiently(session, "listing", {**run, "path": path}, _HASH_S)
    real = _safe(found["real"])
    base = into / str(record.run) / real
    files = [(_safe(file["path"]), int(file["size"]), str(file["sha256"])) for file in found["files"]]
    if len(files) > _MOST_FILES:
        raise EnvironmentFault(f"host {session.host.name} names {len(files)} files, more than {_MOST_FILES}")
    try:
        moved = _fetch(session, record, run, real, base, into, files, tell)
        for link in found["links"]:
            _link(base / _safe(link["path"]), str(link["target"]), into)
    except OSError as error:
        raise EnvironmentFault(f"{error.filename or base} cannot be written: {error.strerror or error}") from error
    return Moved(session.host.name, f"{record.run}/{real}", str(base), len(files), moved, sum(size for _, size, _ in files))


def _fetch(
    session: HostSession,
    record: RunRecord,
    run: dict[str, Any],
    real: PurePosixPath,
    base: Path,
    into: Path,
    files: list[tuple[PurePosixPath, int, str]],
    tell: Tell,
) -> int:
    """Bring what of `files` (name, bytes, sha256) is not here yet; how many bytes came. Raises OSError of the disk here."""
    missing = [file for file in files if not _is_same(base / file[0], file[1], file[2])]
    total, moved, done = sum(size for _, size, _ in missing), 0, 0
    for name, size, digest in missing:
        final = base / name
        _real_folder(final.parent, into)
        part = final.with_name(f".{final.name}.partial")
        offset = min(part.stat().st_size, size) if part.is_file() and not part.is_symlink() else 0
        done += offset
        with open(part, "r+b" if offset else "wb") as stream:
            stream.truncate(offset)
            stream.seek(offset)
            while offset < size:
                request = {**run, "path": (real / name).as_posix(), "offset": offset, "size": min(PULL_BYTES, size - offset)}
                piece = base64.b64decode(_patiently(session, "get", request, _PIECE_S)["data"])[: size - offset]
                if not piece:
                    raise EnvironmentFault(f"{record.name}: {name} has become shorter while it was read", hint="pull again")
                stream.write(piece)
                offset, moved, done = offset + len(piece), moved + len(piece), done + len(piece)
                tell(str(name), done, total)
        if not _is_same(part, size, digest):
            part.unlink()
            raise EnvironmentFault(f"{record.name}: {name} is not what the host has", hint="pull again")
        part.replace(final)
    return moved


def _patiently(session: HostSession, verb: str, args: dict[str, Any], timeout_s: float, payload: bytes = b"") -> Any:
    """A call that may be made twice: when the link breaks it is opened again, until the host stays away."""
    call = partial(session.call, "transfer", verb, args, payload, timeout_s=timeout_s)
    return patiently(session, call, RECONNECT_S if session.round_trips else 0)  # a host that never answered is not a lost link


def _local_files(source: Path) -> Iterator[dict[str, Any]]:
    """Every file below `source` with its size and sha256; hidden ones and what is not a plain file are refused or left out."""
    if source.is_file():
        yield {"path": "", **_facts(source)}
        return
    if not source.is_dir():
        raise ConfigurationError(f"{source} is neither a file nor a folder")
    for directory, folders, names in os.walk(source, onerror=_raise):
        here = Path(directory)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if links := [name for name in folders if (here / name).is_symlink()]:
            raise ConfigurationError(
                f"{here / links[0]} is a link to a folder, which is not sent; put the files themselves there"
            )
        for name in sorted(names):
            if not name.startswith(".") and (here / name).is_file():
                yield {"path": (here / name).relative_to(source).as_posix(), **_facts(here / name)}


def _raise(error: OSError) -> None:
    raise ConfigurationError(f"{error.filename} cannot be read: {error.strerror}") from error


def _facts(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error


def _is_same(path: Path, size: int, digest: str) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
        return False
    return bool(_facts(path)["sha256"] == digest)


def _safe(name: object) -> PurePosixPath:
    """A path that a host named, if it stays below the folder that it belongs to."""
    path = PurePosixPath(str(name))
    if path.is_absolute() or ".." in path.parts or "\0" in str(name) or "\\" in str(name):
        raise EnvironmentFault(f"the host names a file outside its run: {name!r}")
    return path


def _real_folder(folder: Path, into: Path) -> None:
    """Make `folder`; raises EnvironmentFault where a symlink leads it out of `into`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not folder.resolve().is_relative_to(into.resolve()):
        raise EnvironmentFault(f"{folder} leads out of {into}", hint="pull into another folder: --into")


def _link(path: Path, target: str, into: Path) -> None:
    """`latest` -> `step-100`: a link to a neighbour and nothing else."""
    if "/" in target or target in ("", ".", "..") or (path.exists() and not path.is_symlink()):
        return
    _real_folder(path.parent, into)
    path.unlink(missing_ok=True)
    os.symlink(target, path)
