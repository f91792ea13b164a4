"""events.jsonl is of one start, and its last event says how that ended."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer import evaluate, prepare

OTHERS = '{"event": "started"}\n{"event": "finished"}\n'


def told(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def arguments(trained: Any, folder: Path) -> list[str]:
    (folder / "prompts.jsonl").write_text('"w1 w2 w3"\n')
    given = ["--checkpoint", trained.checkpoint, "--target", trained.target, "--prompts", folder / "prompts.jsonl"]
    return [*map(str, given), "--max-new-tokens", "4", "--dtype", "float32", "--output", str(folder / "out")]


def test_an_evaluation_that_cannot_be_written_has_failed(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / ".evaluation.json.partial").mkdir(parents=True)
    assert evaluate.main(arguments(trained, tmp_path)) == 3
    err = capsys.readouterr().err
    error = err.splitlines()[-1]  # the prompt was answered
    assert error.startswith(f"error: --output {tmp_path / 'out'} cannot be used: ")
    assert told(tmp_path / "out" / "events.jsonl") == ["started", "prompt", "failed"]
    last = json.loads((tmp_path / "out" / "events.jsonl").read_text().splitlines()[-1])
    assert error == f"error: {last['error']}"


def test_what_fails_in_the_evaluation_itself_is_not_the_outputs_fault(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError("no GPU answers")

    monkeypatch.setattr(evaluate, "load_causal_lm", failing)
    with pytest.raises(OSError, match="no GPU answers"):
        evaluate.main(arguments(trained, tmp_path))
    assert told(tmp_path / "out" / "events.jsonl") == ["started", "failed"]


def test_an_evaluation_beside_other_events_moves_them_aside(trained: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "events.jsonl").write_text(OTHERS)
    assert evaluate.main(arguments(trained, tmp_path)) == 0
    assert told(tmp_path / "out" / "events.jsonl") == ["started", "prompt", "finished"]
    assert (tmp_path / "out" / "events.1.jsonl").read_text() == OTHERS


def test_a_preparation_beside_a_training_run_moves_its_events_aside(make_target: Callable[[str], Path], tmp_path: Path) -> None:
    make_target()
    chat = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi, you"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    config = {
        "target": {"path": "target"},
        "data": {"path": "out"},
        "prepare": {"input": ["chats.jsonl"], "held_out": 0},
        "run": {"root": str(tmp_path)},
    }
    run = tmp_path / "run"
    (run / "checkpoints" / "step-6").mkdir(parents=True)
    (run / "checkpoints.1").mkdir()
    (run / "config.json").write_text(json.dumps(config))
    (run / "events.jsonl").write_text(OTHERS)
    assert prepare.main([str(run / "config.json")]) == 0
    assert told(run / "events.jsonl") == ["started", "finished"]
    assert json.loads((run / "events.jsonl").read_text().splitlines()[0])["input"] == ["chats.jsonl"]
    assert (run / "events.2.jsonl").read_text() == OTHERS, "1 is that of the checkpoints that lie there"
    assert (run / "checkpoints" / "step-6").is_dir()
    assert prepare.main([str(run / "config.json")]) == 3  # the output is there by now
    assert told(run / "events.jsonl") == ["started", "failed"]
    assert told(run / "events.3.jsonl") == ["started", "finished"]
