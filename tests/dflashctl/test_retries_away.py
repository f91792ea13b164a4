"""Retries while the host, its container or this machine's history is away: waited for where looking is all there is to do."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflashctl import retries, session, watch
from dflashctl.errors import (
    ContainerError,
    ContainerStoppedError,
    DflashctlError,
    HostError,
    RemoteTimeoutError,
    StopIncompleteError,
)
from dflashctl.launch import Launched, Options
from dflashctl.runs import History, RunRecord

KILLED = {"state": "killed", "exit_code": 137, "signal": 9}
AWAY = [ContainerStoppedError("it is stopped"), ContainerError("frozen"), HostError("refused"), RemoteTimeoutError("silent")]


class Host:
    """A host that does not answer its next `away` calls, and then says that each run is dead and has a checkpoint."""

    host = SimpleNamespace(root="/r", name="far", place="p")

    def __init__(self, error: DflashctlError, away: int) -> None:
        self.error = error
        self.away = away
        self.started: list[Options] = []
        self.notes: list[str] = []

    def call(self, _program: str, verb: str, args: dict[str, Any], **_: Any) -> Any:
        if self.away > 0:
            self.away -= 1
            raise self.error
        if verb == "stop":
            return {"already": True, "leftovers": 0, "survivors": [], "warning": None, "state": KILLED, "gpus": []}
        if verb == "peek":
            return {"state": KILLED, "data": "", "place": watch.BEGIN, "log": "", "left": 0, "restarted": False}
        assert verb == "checkpoint"
        return {"checkpoint": f"runs/{args['run']}/checkpoints/step-10", "is_last": False}

    def reconnect(self) -> None:
        pass

    def start(self, options: Options) -> Launched:
        self.started.append(options)
        run = f"quick-{len(self.started)}"
        resumes = options.resume.run if options.resume else None
        record = RunRecord(launch_id=run, host="far", place="p", tag="quick", created_at="now", run=run, resumes=resumes)
        nothing: dict[str, Any] = dict.fromkeys(("exit_code", "oom_kills", "warning", "cleared_cache", "pid"))
        rest = {"gpus": (), "release": "r", "watched_s": 0, "lines": [], "overridden": [], "log": "", "run_dir": ""}
        return Launched(record=record, run=run, tag="quick", host="far", state="running", **nothing, **rest)

    def stay(self, history: History, states: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        ways = retries.Ways(start=self.start, show=lambda _: None, follow=lambda _: next(states), note=self.notes.append)
        return retries.stay(self, history, Options(), 3, ways)  # type: ignore[arg-type]


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    monkeypatch.setattr(session, "_AGAIN_S", 0)
    return History(tmp_path, {"far": "p"})


@pytest.mark.parametrize("error", AWAY, ids=str)
def test_who_is_away_after_a_death_is_waited_for(history: History, error: DflashctlError) -> None:
    host = Host(error, away=7)
    lost = {"state": "lost", "exit_code": None}
    tries = host.stay(history, iter([lost, {"state": "exited", "exit_code": 0}]))
    assert [(run["run"], run["state"], run["resumes"]) for run in tries] == [
        ("quick-1", "lost", None),
        ("quick-2", "exited", "quick-1"),
    ]
    assert [options.retries and options.retries.run for options in host.started] == [None, "quick-1"]
    assert host.notes == [
        f"{error}; connecting again, for 15 minutes at most",
        "retry 1 of 3: from runs/quick-1/checkpoints/step-10",
    ]


@pytest.mark.parametrize("error", AWAY, ids=str)
def test_who_stays_away_ends_it_and_the_run_is_named(
    history: History, error: DflashctlError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "PATIENCE_S", 0.0)
    host = Host(error, away=10**9)
    with pytest.raises(type(error)) as raised:
        host.stay(history, iter([KILLED]))
    assert (raised.value.details["run"], raised.value.details["host"]) == ("quick-1", "far")
    assert [run["run"] for run in raised.value.details["tries"]] == ["quick-1"]  # type: ignore[attr-defined]
    assert raised.value.hint == "later: dflashctl launch --resume quick-1 --retries N"
    assert len(host.started) == 1


@pytest.mark.parametrize("error", AWAY[1:], ids=str)
def test_a_lost_link_is_waited_for_as_long_as_asked(history: History, error: DflashctlError) -> None:
    record = Host(error, 0).start(Options()).record
    say = {"emit": lambda _: None, "note": lambda _: None, "place": watch.BEGIN}
    state = watch.follow(Host(error, away=7), record, history, patience_s=60, **say)  # type: ignore[arg-type]
    assert state["state"] == "killed"
    with pytest.raises(type(error)):
        watch.follow(Host(error, away=10**9), record, history, patience_s=0, **say)  # type: ignore[arg-type]


@pytest.mark.parametrize("survivors", [[], [{"pid": 7}]])
def test_memory_that_is_not_given_back_yet_ends_nothing_but_a_survivor_does(
    history: History, survivors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise StopIncompleteError("something is left", details={"survivors": survivors})

    monkeypatch.setattr(retries, "stop", stop)
    host = Host(HostError("refused"), away=0)
    states = iter([KILLED, {"state": "exited", "exit_code": 0}])
    if survivors:
        with pytest.raises(StopIncompleteError):
            host.stay(history, states)
    else:
        assert len(host.stay(history, states)) == 2


@pytest.mark.parametrize("words", [("--follow",), ("--retries", "2")], ids=" ".join)
def test_a_history_that_cannot_be_written_any_more_loses_no_run(bench, words: tuple[str, ...]) -> None:
    path = str(bench.folder / "state/history.jsonl")
    bench.trainer(f"import os; os.remove({path!r}); os.mkdir({path!r}); print('up')")
    done = bench("launch", "--tag", "quick", "--startup-seconds", "30", *words)
    assert done.exit_code == 0, done.stderr
    assert "warning: history cannot be written: " in done.stderr
    assert done.stdout.endswith("up\n")
    assert "local:quick-1 exited 0" in done.stderr
