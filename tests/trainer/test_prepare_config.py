"""`python -m trainer.prepare CONFIG.json` does what a run's configuration says, and tells it in events.jsonl beside it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer import prepare
from trainer.config import TrainConfig
from trainer.dataset import open_shards
from trainer.errors import ConfigError
from trainer.events import alone_in
from trainer.regenerate import Progress


@pytest.fixture
def config(make_target: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    """Of a run whose root is `tmp_path`: a target and two chats are there."""
    make_target()
    turns = [[("user", text), ("assistant", text * 3)] for text in ("a", "much longer than ten bytes")]
    chats = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return {
        "target": {"path": "target"},
        "data": {"path": "made/out"},
        "prepare": {"input": ["chats.jsonl"], "held_out": 0},
        "batch": {"row_tokens": 60},
        "run": {"root": str(tmp_path)},
    }


def written(folder: Path, config: object) -> str:
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run/config.json").write_text(json.dumps(config))
    return str(folder / "run/config.json")


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]


def test_everything_is_in_the_configuration(config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main([written(tmp_path, config)]) == 0
    output = tmp_path / "made/out"
    assert len(open_shards(output, "train")) == 1
    out = capsys.readouterr().out
    assert out.startswith("kept 1 of 2 conversations: 1 to train on, 0 held out\n")
    assert out.endswith(f"  1  its first answer ends after 60 tokens\nwrote {output}\n")
    started, finished = events(tmp_path)
    assert (started["event"], started["input"], started["output"]) == ("started", ["chats.jsonl"], "made/out")
    assert (finished["event"], finished["kept"]) == ("finished", {"train": 1})
    assert finished["dropped"] == {"its first answer ends after 60 tokens": 1}


def test_heartbeats_tell_whether_answers_come(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(prepare, "OVERDUE_S", 0.0)

    def next_beats() -> list[bool]:
        deadline, known = time.monotonic() + 60, len(events(tmp_path))
        while len(found := events(tmp_path)[known:]) < 3:
            assert time.monotonic() < deadline
        return [event["overdue"] for event in found[1:]]

    def work(_config: TrainConfig, tell: Callable[[Progress], object]) -> prepare.Report:
        assert not any(next_beats())
        tell(Progress(1, 2, 1.0, 1.0, 1.0))
        assert all(next_beats()[1:])
        tell(Progress(2, 2, 1.0, 1.0, 0.0))
        assert not any(next_beats()[1:])
        return prepare.Report(tmp_path, 60)

    monkeypatch.setattr(prepare, "_configured", work)
    assert prepare.main([written(tmp_path, config)]) == 0
    assert {event["event"] for event in events(tmp_path)} == {"started", "heartbeat", "progress", "finished"}
    assert events(tmp_path)[-1]["event"] == "finished"


def test_documents_may_be_kept_shorter_than_a_row(config: dict[str, Any], tmp_path: Path) -> None:
    config["batch"]["row_tokens"] = 400
    config["prepare"]["max_tokens"] = 60
    assert prepare.main([written(tmp_path, config)]) == 0
    assert events(tmp_path)[-1]["dropped"] == {"its first answer ends after 60 tokens": 1}


@pytest.mark.parametrize(
    ("section", "change", "sentence"),
    [
        ("prepare", {"input": ["chat.jsonl"]}, "/chat.jsonl cannot be read"),
        ("prepare", {"input": []}, "prepare.input must name at least one JSONL file, got []"),
        ("prepare", {"inputs": []}, "prepare: unknown key 'inputs'; did you mean 'input'?"),
        ("data", {"path": "target"}, "/target exists already; remove it or choose another place"),
        ("target", {"path": "nowhere"}, "target.path must be a folder or a hub id such as"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_the_last_event(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, change: Any, sentence: str
) -> None:
    config[section] |= change
    assert prepare.main([written(tmp_path, config)]) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert sentence in err
    assert err == f"error: {events(tmp_path)[-1]['error']}\n"
    assert events(tmp_path)[-1]["event"] == "failed"
    assert not (tmp_path / "made/out").exists()


def test_the_events_of_a_run_that_works_there_stay(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, config)
    (tmp_path / "run/events.jsonl").write_text("of the training")
    with alone_in(tmp_path / "run"):
        assert prepare.main([path]) == 3
    assert capsys.readouterr() == ("", f"error: {tmp_path / 'run'}: another run works in this folder\n")
    assert (tmp_path / "run/events.jsonl").read_text() == "of the training"
    assert not (tmp_path / "run/events.1.jsonl").exists()
    assert prepare.main([path]) == 0, "nobody works there any more"


def test_a_configuration_goes_with_no_option_and_without_one_three_are_needed(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, sentence in (
        ([written(tmp_path, config), "--held-out", "0.5"], "CONFIG.json says everything; it goes with no option"),
        (["--held-out", "0.5"], "CONFIG.json, or --input, --output and --target are required"),
    ):
        with pytest.raises(SystemExit, match="2"):
            prepare.main(words)
        assert sentence in capsys.readouterr().err
    assert prepare.main([str(tmp_path / "none.json")]) == 3
    assert "none.json cannot be used" in capsys.readouterr().err
    (tmp_path / "run/config.json").write_text("{")
    assert prepare.main([str(tmp_path / "run/config.json")]) == 3
    assert "config.json is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "cuda", "device"),
    [
        ({"regenerate": True}, True, "cuda:0"),
        ({"regenerate": True}, False, "cpu"),
        ({"regenerate": True, "server": "http://host:8000/v1"}, True, "cpu"),
        ({}, True, "cpu"),
    ],
)
def test_a_gpu_is_used_if_the_target_answers_on_one(
    config: dict[str, Any], how: dict[str, Any], cuda: bool, device: str
) -> None:
    config["prepare"] |= how
    if not cuda:
        config["pipeline"] = {"target_devices": ["cpu"], "drafter_devices": ["cpu"], "graphs": "none"}
    assert TrainConfig.from_dict(config).prepare_device == device


def test_training_asks_nothing_of_the_section(config: dict[str, Any]) -> None:
    useless = TrainConfig.from_dict(config | {"prepare": {"temperature": 0.5, "server": "nowhere"}})
    with pytest.raises(ConfigError, match=r"prepare\.input must name"):
        useless.prepare.check()
    del config["prepare"]
    assert not TrainConfig.from_dict(config).prepare.regenerate
