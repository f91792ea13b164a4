"""The laptop's memory of runs: an append-only history.jsonl under the state directory, read by every verb that takes a RUN.

A launch is written down before anything is sent, so that a link lost half-way leaves a trace to look for. The newest line of a
launch id wins; a torn last line is passed over and said.
"""

import contextlib
import fcntl
import getpass
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from dflashctl.errors import EnvironmentFault, RunNotFoundError

_RUN = re.compile(r"(?:(?P<host>[^:\s]+):)?(?P<run>[a-z0-9][a-z0-9_-]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One launch as the laptop remembers it; `run` is None until the host has claimed a folder for it."""

    launch_id: str
    host: str
    place: str
    tag: str
    created_at: str
    run: str | None = None
    release: str | None = None
    hypothesis: str | None = None
    resumes: str | None = None
    """The run from whose checkpoint it went on."""
    state: str | None = None
    exit_code: int | None = None

    @property
    def name(self) -> str:
        """`HOST:RUN`, as every RUN argument takes it."""
        return f"{self.host}:{self.run}"


def record_of(entry: Mapping[str, Any], host: str, place: str) -> RunRecord:
    """One launch as its host tells of it; `entry` is {record, state}."""
    record, state = entry["record"], entry["state"]
    return RunRecord(
        launch_id=str(record.get("launch_id") or ""),
        host=host,
        place=place,
        tag=str(record.get("tag")),
        created_at=_text(record.get("launched_at")) or state.get("started_at") or "",
        run=str(record.get("run")),
        release=_text(record.get("release")),
        hypothesis=_text(record.get("hypothesis")),
        resumes=_text(record.get("resumes")),
        state=state["state"],
        exit_code=state["exit_code"],
    )


def _text(value: object) -> str | None:
    """What a host calls a text, which may be anything where somebody has edited run.json."""
    return value if isinstance(value, str) else None


def state_directory(environ: Mapping[str, str]) -> Path:
    """DFLASHCTL_STATE_DIR, else XDG_STATE_HOME/dflashctl, else ~/.local/state/dflashctl."""
    if environ.get("DFLASHCTL_STATE_DIR"):
        return Path(environ["DFLASHCTL_STATE_DIR"]).expanduser()
    base = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".local" / "state"
    return Path(base) / "dflashctl"


def who() -> str:
    """The user of this machine, as runs and leases name him."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return f"unknown@{socket.gethostname()}"


class History:
    """history.jsonl; several command lines may write at once."""

    def __init__(self, directory: Path, places: Mapping[str, str]) -> None:
        """Use `directory`, made on the first write; of what it holds, the runs of `places` (host name -> place) are seen."""
        self._path = directory / "history.jsonl"
        self._places = places
        self._newest: dict[str, RunRecord] = {}
        self.torn_lines = 0

    def append(self, record: RunRecord) -> None:
        """Add one line; raises EnvironmentFault when the state directory cannot be written."""
        with self._locked() as file:
            self._add(file, record)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
        except OSError as error:
            raise EnvironmentFault(
                f"history cannot be written: {self._path}: {error.strerror}", hint="set DFLASHCTL_STATE_DIR"
            ) from error

    def _add(self, file: BinaryIO, record: RunRecord) -> None:
        line = json.dumps({"schema": 1} | asdict(record)) + "\n"
        if file.seek(0, os.SEEK_END) and not _ends_a_line(file):
            line = "\n" + line  # an interrupted write must not swallow this one
        file.write(line.encode())
        file.flush()
        self._newest[record.launch_id] = record

    def records(self) -> list[RunRecord]:
        """Newest first, one a launch."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise EnvironmentFault(f"history cannot be read: {self._path}: {error.strerror}") from error
        latest: dict[str, RunRecord] = {}
        self.torn_lines = 0
        for line in filter(None, lines):
            record = _parse(line)
            if record is None:
                self.torn_lines += 1
            else:
                latest[record.launch_id] = record
        self._newest = latest
        seen = [record for record in latest.values() if self._places.get(record.host) == record.place]
        return sorted(seen, key=lambda r: r.created_at, reverse=True)

    def remember(self, record: RunRecord, state: Mapping[str, Any]) -> None:
        """Write down the state that was learnt of a run, if it is news, which `unknown` is not.

        Nothing else is taken from `record`: it may have been read before a slow host answered, or tell the host's time. A
        history that cannot be written hides no answer: a state can be asked for again.
        """
        learnt = (state["state"], state["exit_code"])
        known = self._newest.get(record.launch_id)
        if state["state"] == "unknown" or (known and (known.state, known.exit_code) == learnt):
            return
        with contextlib.suppress(EnvironmentFault), self._locked() as file:
            old = _newest_line(file, record.launch_id) or record
            new = replace(old, state=state["state"], exit_code=state["exit_code"])
            if new == old:
                self._newest[record.launch_id] = old  # somebody else has written it
            elif old.run:
                self._add(file, new)

    def newest(self) -> dict[str, RunRecord]:
        """The newest line of every launch id: for `merge`, to be read before a host is asked."""
        self.records()
        return dict(self._newest)

    def merge(self, host: str, found: Sequence[Mapping[str, Any]], before: Mapping[str, RunRecord]) -> None:
        """Take in what a host says of its runs: `found` is [{record, state}]; lines are added only for what changed.

        What has been written of a run since `before` is newer than the answer and stays. What a run.json that was damaged does
        not tell any more stays known, and a folder that does not tell its launch is no run.
        """
        for entry in found:
            new = record_of(entry, host, self._places[host])
            old = before.get(new.launch_id)
            if old:
                kept = {name: getattr(new, name) or getattr(old, name) for name in ("release", "hypothesis", "resumes")}
                new = replace(new, created_at=old.created_at, **kept)
            if new.launch_id and new != old:
                with self._locked() as file:
                    if _newest_line(file, new.launch_id) == old:
                        self._add(file, new)

    def _newest_of_each_name(self) -> list[RunRecord]:
        """A run folder that was deleted gives its name to nobody, but a deleted root does: the newest launch has it."""
        named: dict[str, RunRecord] = {}
        for record in self.records():
            if record.run:
                named.setdefault(record.name, record)
        return list(named.values())

    def find(self, text: str | None) -> RunRecord:
        """RUN as people write it: exact id, else unique prefix, else HOST:RUN; None: the newest."""
        records = self._newest_of_each_name()
        if text is None:
            if not records:
                raise RunNotFoundError("no run yet", hint="dflashctl launch --tag TAG, or dflashctl runs --refresh")
            return records[0]
        match = _RUN.fullmatch(text)
        if not match:
            raise RunNotFoundError(f"RUN must be RUN or HOST:RUN, got '{text}'")
        candidates = [r for r in records if match["host"] in (None, r.host)]
        exact = [r for r in candidates if r.run == match["run"]]
        found = exact or [r for r in candidates if r.run and r.run.startswith(match["run"])]
        if len(found) == 1:
            return found[0]
        if not found:
            raise RunNotFoundError(f"no run '{text}' in this machine's history", hint="dflashctl runs --refresh asks the hosts")
        names = ", ".join(sorted(r.name for r in found))
        raise RunNotFoundError(f"'{text}' could be any of {names}", hint="name one of them")


def _is_record(values: Any) -> bool:
    required = all(isinstance(values.get(name), str) for name in ("launch_id", "host", "place", "tag", "created_at"))
    optional = all(isinstance(values.get(name), str | None) for name in ("run", "release", "hypothesis", "resumes", "state"))
    return required and optional and isinstance(values.get("exit_code"), int | None)


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _newest_line(file: BinaryIO, launch_id: str) -> RunRecord | None:
    file.seek(0)
    for line in reversed(file.read().splitlines()):
        if launch_id.encode() in line and (record := _parse(line)) and record.launch_id == launch_id:
            return record
    return None


def _parse(line: bytes) -> RunRecord | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not _is_record(values):
        return None
    known: dict[str, Any] = {f.name: values.get(f.name) for f in fields(RunRecord)}
    return RunRecord(**known)
