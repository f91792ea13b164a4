"""Files to and from the host in pieces: a broken link costs one piece, and nothing counts before its sha256 is right.

What comes in grows under root/incoming/<id>/ and is renamed into place at the end; a file that is there already, byte for
byte, is not sent again. What goes out is read up to the size that it had when it was listed, so a growing log is whole too.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Iterator

from dflashctl.onhost.entry import Fault
from dflashctl.onhost.layout import Layout, modified

_BLOCK = 1 << 20
_STALE_S = 7 * 86400.0
_OURS = frozenset({"releases", "runs", "caches", "leases", "withdrawn", "incoming", "venv", "venvs", "current"})
_NOT_PULLED = frozenset({"cache", "secrets.sh", "room"})


def plan(args: dict[str, Any]) -> dict[str, Any]:
    """What of `files` [{path, size, sha256}] is still to be sent to root/`dest`: `offsets` {path: bytes that are here}.

    Raises Fault where `dest` is a place of ours or, for a file, a folder, and where the disk is too small.
    """
    layout = Layout(args["root"])
    dest, incoming = _dest(layout, args["dest"]), _incoming(layout, args["id"])
    if dest.is_dir() and not all(file["path"] for file in args["files"]):
        raise Fault("environment", f"{args['dest']} is a folder: name the file that is to lie in it")
    offsets = {}
    for file in args["files"]:
        if not _is_same(dest / file["path"] if file["path"] else dest, file):
            part = incoming / (file["path"] or "file")
            offsets[file["path"]] = min(part.stat().st_size, file["size"]) if part.is_file() else 0
    missing = sum(file["size"] - offsets[file["path"]] for file in args["files"] if file["path"] in offsets)
    layout.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(layout.root).free
    if missing > free:
        raise Fault("environment", f"root {layout.root} has {free >> 20} MiB free, and {missing >> 20} MiB are to come")
    return {"offsets": offsets, "dest": str(dest)}


def put(args: dict[str, Any]) -> dict[str, Any]:
    """Append `payload_bytes` from standard input to one file that is coming in, at `offset`; answers its `size`."""
    layout = Layout(args["root"])
    part = _incoming(layout, args["id"]) / (_relative(args["path"]) if args["path"] else "file")
    part.parent.mkdir(parents=True, exist_ok=True)
    data = sys.stdin.buffer.read(args["payload_bytes"])
    if len(data) != args["payload_bytes"]:
        raise Fault("environment", f"{args['path']}: only {len(data)} of {args['payload_bytes']} bytes arrived")
    with open(part, "ab") as file:
        file.truncate(args["offset"])  # what a broken piece has left
        file.seek(args["offset"])
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"size": part.stat().st_size}


def commit(args: dict[str, Any]) -> dict[str, Any]:
    """Verify all that came in and move it to root/`dest`; raises Fault, and then nothing is at its place."""
    layout = Layout(args["root"])
    dest, incoming = _dest(layout, args["dest"]), _incoming(layout, args["id"])
    coming = [file for file in args["files"] if (incoming / (file["path"] or "file")).is_file()]
    for file in coming:
        part = incoming / (file["path"] or "file")
        if not _is_same(part, file):
            part.unlink()
            raise Fault("environment", f"{file['path'] or dest.name}: what arrived is not what was sent", "push again")
    for file in coming:
        final = dest / file["path"] if file["path"] else dest
        final.parent.mkdir(parents=True, exist_ok=True)
        os.replace(incoming / (file["path"] or "file"), final)
    shutil.rmtree(incoming, ignore_errors=True)
    absent = [file["path"] for file in args["files"] if not (dest / file["path"] if file["path"] else dest).is_file()]
    if absent:
        raise Fault("environment", f"{absent[0]} has not arrived", "push again")
    _prune(layout)
    return {"moved": len(coming)}


def listing(args: dict[str, Any]) -> dict[str, Any]:
    """`files` [{path, size, sha256}] and `links` [{path, target}] of a run's folder below `path`; caches and secrets stay."""
    folder = Layout(args["root"]).find_run(args["run"], args["launch_id"]).path
    start = folder / _pulled(args["path"])
    real = Path(os.path.realpath(start))
    if not start.exists() or Path(os.path.realpath(folder)) not in (real, *real.parents):
        raise Fault("run_not_found", f"run {args['run']} has no {args['path']}")
    files, links = [], []
    for path in _walk(real):
        name = path.relative_to(real).as_posix() if path != real else ""
        if path.is_symlink():
            links.append({"path": name, "target": os.readlink(path)})
        else:
            size = path.stat().st_size
            files.append({"path": name, "size": size, "sha256": _sha256(path, size)})
    return {"files": files, "links": links, "real": real.relative_to(os.path.realpath(folder)).as_posix()}


def get(args: dict[str, Any]) -> dict[str, Any]:
    """`data` (base64): `size` bytes from `offset` of one file of a run."""
    folder = Layout(args["root"]).find_run(args["run"], args["launch_id"]).path
    with open(folder / _pulled(args["path"]), "rb") as file:
        file.seek(args["offset"])
        return {"data": base64.b64encode(file.read(args["size"])).decode()}


def _relative(path: str) -> Path:
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise Fault("environment", f"a path must lie in its folder, got {path}")
    return Path(path)


def _pulled(path: str) -> Path:
    """Of a run's folder: caches and secrets stay."""
    relative = _relative(path)
    if relative.parts[:1] and relative.parts[0] in _NOT_PULLED:
        raise Fault("environment", f"{relative.parts[0]} of a run is not given away, got {path}")
    return relative


def _dest(layout: Layout, dest: str) -> Path:
    parts = _relative(dest).parts
    if not parts or parts[0] in _OURS or parts[0].startswith((".", "train_")):
        raise Fault(
            "environment", f"files go to a folder of their own under {layout.root}, such as data/ or targets/, got {dest}"
        )
    return layout.root.joinpath(*parts)


def _incoming(layout: Layout, name: str) -> Path:
    return layout.root / "incoming" / _relative(name)


def _walk(start: Path) -> Iterator[Path]:
    if start.is_file():
        yield start
    for directory, folders, names in os.walk(start):
        top = Path(directory) == start
        folders[:] = sorted(name for name in folders if not (top and name in _NOT_PULLED))
        links = [name for name in folders if (Path(directory) / name).is_symlink()]
        for name in sorted([*names, *links]):
            path = Path(directory, name)
            if not (top and name in _NOT_PULLED) and (path.is_symlink() or path.is_file()):
                yield path


def _is_same(path: Path, file: dict[str, Any]) -> bool:
    try:
        size = path.stat().st_size
        return bool(size == file["size"] and _sha256(path, size) == file["sha256"])
    except OSError:
        return False


def _sha256(path: Path, size: int) -> str:
    """Of the first `size` bytes."""
    digest, left = hashlib.sha256(), size
    with open(path, "rb") as file:
        while left:
            block = file.read(min(left, _BLOCK))
            if not block:
                break
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _prune(layout: Layout) -> None:
    """What was given up a week ago."""
    for path in (layout.root / "incoming").glob("*"):
        if time.time() - modified(path) > _STALE_S:
            shutil.rmtree(path, ignore_errors=True)


VERBS = {"plan": plan, "put": put, "commit": commit, "listing": listing, "get": get}
