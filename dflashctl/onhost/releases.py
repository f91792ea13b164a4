"""Releases on the host: look what lies there, take in a tar stream, check it, swap it in.

Whatever fails leaves the old release active: everything happens in `releases/.incoming-<id>` until two renames.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from dflashctl.onhost.entry import Fault, require_python
from dflashctl.onhost.layout import Layout, modified, point_link

KEPT_RELEASES = 3
_STALE_INCOMING_S = 3600.0


def inspect(args: dict[str, Any]) -> dict[str, Any]:
    """Compare `manifest` {path: sha256} with what lies on the host, by hashing it again.

    `intact`: releases/<digest> holds exactly these bytes. `active`: it is also what `current` points to. `changed`: paths that
    differ from the current release.
    """
    require_python(args["minimum_python"])
    layout, manifest = Layout(args["root"]), args["manifest"]
    previous = layout.current_release()
    release = layout.release(args["digest"])
    intact = _hashes(release) == manifest
    old = _hashes(layout.release(previous)) if previous else {}
    changed = sorted(path for path in {*old, *manifest} if old.get(path) != manifest.get(path))
    check = _parse_check(release, manifest) if intact else None
    return {
        "intact": intact,
        "active": intact and previous == args["digest"],
        "previous": previous,
        "changed": changed,
        "parse_check": check,
    }


def install(args: dict[str, Any]) -> dict[str, Any]:
    """Take `payload_bytes` of tar from standard input, verify, parse-check, activate; answers `parse_check`, `pruned`."""
    require_python(args["minimum_python"])
    layout, manifest, digest = Layout(args["root"]), args["manifest"], args["digest"]
    archive = sys.stdin.buffer.read(args["payload_bytes"])
    layout.releases.mkdir(parents=True, exist_ok=True)
    incoming = layout.releases / f".incoming-{args['id']}"
    try:
        incoming.mkdir()
        _unpack(archive, incoming, manifest)
        if _hashes(incoming) != manifest:
            raise Fault("environment", "what arrived is not what was sent: sha256 differs", "deploy again")
        check = _parse_check(incoming, manifest)
        if check["errors"]:
            return {"parse_check": check, "pruned": []}
        with layout.lock():
            _settle(incoming, layout.release(digest), manifest)
            point_link(layout.current, f"releases/{digest}")
            pruned = _prune(layout, keep=digest)
        return {"parse_check": check, "pruned": pruned}
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def activate(args: dict[str, Any]) -> dict[str, Any]:
    """Point `current` at a release that already lies there intact."""
    layout = Layout(args["root"])
    with layout.lock():
        os.utime(layout.release(args["digest"]))  # an error where somebody has pruned it meanwhile
        point_link(layout.current, f"releases/{args['digest']}")
    return {}


def current(args: dict[str, Any]) -> dict[str, Any]:
    """The active `release`, or None."""
    return {"release": Layout(args["root"]).current_release()}


def _unpack(archive: bytes, folder: Path, manifest: dict[str, str]) -> None:
    """Only regular files that the manifest names: an archive cannot write anywhere else."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            source = tar.extractfile(member) if member.isreg() and member.name in manifest else None
            if source is None:
                raise Fault("environment", f"unexpected entry in the archive: {member.name}")
            path = folder / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                shutil.copyfileobj(source, file)
                file.flush()
                os.fsync(file.fileno())


def _hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file under `folder`, by its relative path; a file that cannot be read has no right value."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() or path.is_symlink():
            name = path.relative_to(folder).as_posix()
            try:
                found[name] = "link" if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as error:
                found[name] = f"unreadable: {error.strerror}"
    return found


def _parse_check(folder: Path, manifest: dict[str, str]) -> dict[str, Any]:
    """Compile every Python file in memory, so no bytecode is left behind."""
    errors: list[str] = []
    names = sorted(name for name in manifest if name.endswith(".py"))
    for name in names:
        try:
            compile((folder / name).read_bytes(), name, "exec", dont_inherit=True)
        except SyntaxError as error:
            errors.append(f"{name}:{error.lineno or 1}: {error.msg}")
        except (ValueError, MemoryError, RecursionError) as error:
            errors.append(f"{name}:1: {error or type(error).__name__}")
    python = "{}.{}.{}".format(*sys.version_info[:3])
    return {"python": python, "files": len(names), "errors": errors}


def _settle(incoming: Path, release: Path, manifest: dict[str, str]) -> None:
    """Rename into place; a release of that name that was damaged on the host gives way."""
    if release.exists():
        if _hashes(release) == manifest:
            os.utime(release)
            return
        # moved aside, not removed: what somebody wrote into it is pruned with a later deploy
        os.rename(release, release.with_name(f".incoming-damaged-{os.getpid()}"))
    os.rename(incoming, release)


def _prune(layout: Layout, keep: str) -> list[str]:
    """Remove old releases that no run names, the newest three kept, and what dead deploys left.

    A run whose record cannot be read may name any of them: then nothing is removed.
    """
    runs = [folder.record() for folder in layout.all_runs()]
    if not all(runs):
        return []
    named = {record.get("release") for record in runs} | {keep}
    old = sorted((path for path in layout.releases.iterdir() if path.name[0] != "."), key=modified, reverse=True)
    pruned = [path for path in old[KEPT_RELEASES:] if path.name not in named]
    now = time.time()
    left = [p for p in layout.releases.glob(".incoming-*") if now - modified(p) > _STALE_INCOMING_S]
    for path in pruned + left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in pruned]


VERBS = {"inspect": inspect, "install": install, "activate": activate, "current": current}
