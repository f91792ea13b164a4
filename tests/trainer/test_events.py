"""events.jsonl: every line strict JSON, the final event last, torn lines passed over."""

import json
import threading
from pathlib import Path

import pytest

from trainer.errors import TrainerError
from trainer.events import EventLog, parse_line


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def test_each_event_has_its_time_and_nothing_follows_the_final_one(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert log.write("started", devices=["cpu"])
    assert log.write("failed", error="no")
    assert not log.write("step", step=1)
    log.close()
    first, last = read(tmp_path / "events.jsonl")
    assert first["event"] == "started"
    assert str(first["time"]).endswith("Z")
    assert first["elapsed_s"] >= 0  # type: ignore[operator]
    assert last["event"] == "failed"


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("step", loss=float("nan"), accuracy=[0.5, float("inf")], wait={"draft": float("-inf")})
    log.close()
    (event,) = read(tmp_path / "events.jsonl")
    assert (event["loss"], event["accuracy"], event["wait"]) == (None, [0.5, None], {"draft": None})


def test_threads_do_not_tear_lines(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    threads = [threading.Thread(target=lambda: [log.write("step", step=i, pad="x" * 500) for i in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    log.close()
    assert len(read(tmp_path / "events.jsonl")) == 400


def test_a_full_disk_is_a_sentence_and_the_end_can_be_told_again() -> None:
    log = EventLog(Path("/dev/full"))
    for _ in range(2):
        with pytest.raises(TrainerError, match=r"^/dev/full cannot be written: No space left on device$"):
            log.write("failed", error="no")
    log.close()
    assert not log.write("failed", error="no")


def test_torn_lines_are_no_events() -> None:
    assert parse_line('{"event": "step", "st') is None
    assert parse_line("[1]") is None
    assert parse_line('{"event": "step", "x": ' + "[" * 100_000) is None
    assert parse_line('{"no": "event"}') is None
    assert parse_line('{"event": "step", "step": 3}') == {"event": "step", "step": 3}
