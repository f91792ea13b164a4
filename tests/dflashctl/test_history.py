"""What `dflashctl runs` remembers: each verb that learns a run's state leaves it in this machine's history."""

from dataclasses import replace
from pathlib import Path

import pytest

from dflashctl.errors import EnvironmentFault
from dflashctl.runs import History, RunRecord

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
UNTIL_TOLD = """
import pathlib, sys, time
while not pathlib.Path("go").exists():
    time.sleep(0.02)
sys.exit(3)
"""


def remembered(bench, run: str) -> list[str]:
    rows = [line.split("\t") for line in bench("runs").stdout.splitlines()]
    return next(row[2:4] for row in rows if row[0] == run)


@pytest.fixture
def ended(bench):
    """A run that has exited 3 since `runs` last heard of it."""
    bench.trainer(UNTIL_TOLD)
    assert bench("launch", "--tag", "quick", "--startup-seconds", "0").exit_code == 0
    assert remembered(bench, "quick-1") == ["running", "-"]
    (bench.run_folder("quick-1") / "go").touch()
    bench.until((bench.run_folder("quick-1") / "exit_code").exists)
    assert remembered(bench, "quick-1") == ["running", "-"]
    return bench


@pytest.mark.parametrize(
    "words",
    [
        ("status", "quick-1"),
        ("status", "--host", "local"),
        ("tail", "quick-1"),
        ("tail", "quick-1", "--no-follow"),
        ("stop", "quick-1"),
    ],
    ids=" ".join,
)
def test_what_a_verb_learns_is_remembered(ended, words: tuple[str, ...]) -> None:
    ended(*words)
    assert remembered(ended, "quick-1") == ["exited", "3"]


def test_a_run_that_is_followed_stopped_or_measured_is_remembered_as_it_ended(bench) -> None:
    bench.trainer("import time; time.sleep(1)")
    bench("launch", "--tag", "quick", "--startup-seconds", "0", "--follow")
    assert remembered(bench, "quick-1") == ["exited", "0"]
    bench.trainer(SLEEPER)
    bench("launch", "--tag", "quick", "--startup-seconds", "0")
    bench("stop", "quick-2")
    assert remembered(bench, "quick-2")[0] == "stopped"
    bench.trainer("import json; print(json.dumps({'go': True, 'reasons': []}))", "smoke.py")
    bench("smoke", "--tag", "quick")
    assert remembered(bench, "quick-smoke-1") == ["exited", "0"]


def test_what_is_known_already_is_not_written_again(ended) -> None:
    path = ended.folder / "state/history.jsonl"
    ended("status", "quick-1")
    known = path.read_bytes()
    for words in (("status", "quick-1"), ("tail", "quick-1"), ("stop", "quick-1"), ("status", "--all")):
        ended(*words)
    assert path.read_bytes() == known


def test_a_history_that_cannot_be_written_hides_no_state(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    history = History(tmp_path / "file" / "state", {})
    record = RunRecord(launch_id="1", host="local", place="here", tag="quick", created_at="now", run="quick-1")
    with pytest.raises(EnvironmentFault, match="history cannot be written"):
        history.append(record)
    history.remember(record, {"state": "exited", "exit_code": 3})


def test_what_was_read_before_a_slow_host_answered_hides_no_run(tmp_path: Path) -> None:
    begun = RunRecord(launch_id="1", host="local", place="here", tag="quick", created_at="now")
    launching, looking = (History(tmp_path, {"local": "here"}) for _ in range(2))
    launching.append(begun)
    (stale,) = looking.records()
    looking.remember(stale, {"state": "starting", "exit_code": None})
    assert looking.records() == [begun]
    named = replace(begun, run="quick-1", state="running")
    launching.append(named)
    looking.remember(stale, {"state": "exited", "exit_code": 3})
    assert launching.records() == [replace(named, state="exited", exit_code=3)]


def test_when_it_was_launched_is_told_by_this_machine(tmp_path: Path) -> None:
    history = History(tmp_path, {"local": "here"})
    mine = RunRecord(launch_id="1", host="local", place="here", tag="quick", created_at="10:00", run="quick-1", state="running")
    history.append(mine)
    history.remember(replace(mine, created_at="11:00"), {"state": "stopped", "exit_code": 143})
    assert history.records() == [replace(mine, state="stopped", exit_code=143)]


def entry(launch_id: str, state: str, **record: object) -> dict:
    kept = {"launch_id": launch_id, "tag": "quick", "run": "quick-1", "launched_at": "10:00", **record}
    return {"record": kept, "state": {"state": state, "exit_code": None, "started_at": None}}


def test_an_answer_that_is_older_than_what_is_known_changes_nothing(tmp_path: Path) -> None:
    history, other = (History(tmp_path, {"local": "here"}) for _ in range(2))
    mine = RunRecord(launch_id="1", host="local", place="here", tag="quick", created_at="10:00", run="quick-1", state="running")
    history.append(mine)
    before = history.newest()
    other.remember(mine, {"state": "stopped", "exit_code": 143})
    history.merge("local", [entry("1", "running")], before)
    assert history.records() == [replace(mine, state="stopped", exit_code=143)]


def test_a_damaged_record_on_a_host_takes_nothing_away(tmp_path: Path) -> None:
    history = History(tmp_path, {"local": "here"})
    mine = RunRecord(
        launch_id="1", host="local", place="here", tag="quick", created_at="10:00", run="quick-1", release="r", hypothesis="h"
    )
    history.append(mine)
    damaged = [entry("1", "exited", hypothesis=5), entry("", "lost", launched_at=None), entry("2", "lost", launched_at=None)]
    history.merge("local", damaged, history.newest())
    first, nameless = history.records()
    assert first == replace(mine, state="exited")
    assert (nameless.launch_id, nameless.created_at) == ("2", "")
    assert history.torn_lines == 0


def test_what_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    history = History(tmp_path / "state", {"local": "here"})
    record = RunRecord(launch_id="1", host="local", place="here", tag="quick", created_at="now", run="quick-1")
    (tmp_path / "state").touch()
    history.remember(record, {"state": "exited", "exit_code": 3})
    (tmp_path / "state").unlink()
    history.remember(record, {"state": "exited", "exit_code": 3})
    assert [found.exit_code for found in history.records()] == [3]
