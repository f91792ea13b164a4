"""What the card says of a run is what that run has told, however odd its files are."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainer import export
from trainer.checkpoint import checkpoint_digest
from trainer.events import utc


def step(number: int, loss: float, acceptance: Any = 1.5) -> str:
    return json.dumps({"event": "step", "step": number, "loss": loss, "acceptance_length": acceptance})


def run_folder(trained: Any, folder: Path) -> Path:
    """A run that was started twice: both starts have a checkpoint of their sixth step."""
    config = json.loads((trained.target.parent / "run.json").read_text())
    config["run"]["root"] = str(trained.target.parent)
    for name, seed, loss in (("events.1.jsonl", 111, 0.111), ("events.jsonl", 222, 0.222)):
        config["run"]["seed"] = seed
        started = json.dumps({"event": "started", "config": config})
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{started}\n{step(6, loss)}\n")
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("checkpoints", "checkpoints.1"):
        (folder / name / "step-6").mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(trained.checkpoint / file, folder / name / "step-6" / file)
    return folder


def card(checkpoint: Path, output: Path, *more: str) -> str:
    assert export.main(["--checkpoint", str(checkpoint), "--output", str(output), *more]) == 0
    return (output / "README.md").read_text()


def test_an_earlier_starts_checkpoint_has_its_own_recipe_and_numbers(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(trained, tmp_path / "run")
    newest = card(run / "checkpoints" / "step-6", tmp_path / "new")
    earlier = card(run / "checkpoints.1" / "step-6", tmp_path / "old")
    for text, seed, loss in ((newest, 222, 0.222), (earlier, 111, 0.111)):
        assert f'"seed": {seed}' in text
        assert f"- training batches, step 6: loss {loss}, estimated acceptance length 1.50\n" in text
    (run / "events.1.jsonl").unlink()
    given = ["--checkpoint", str(run / "checkpoints.1" / "step-6"), "--output", str(tmp_path / "none")]
    capsys.readouterr()
    assert export.main(given) == 3
    assert "--target is required: " in capsys.readouterr().err
    assert "## " not in card(run / "checkpoints.1" / "step-6", tmp_path / "bare", "--target", str(trained.target))


def saved(checkpoint: Path, at: int) -> str:
    """Two events of the start that saved it `at` so many seconds: its last step, and the checkpoint a second later."""
    os.utime(checkpoint / "model.safetensors", (at, at))
    number = int(checkpoint.name.removeprefix("step-"))
    told = {"event": "checkpoint", "time": utc(at + 1), "step": number, "path": f"run/checkpoints/{checkpoint.name}"}
    return f"{step(number, at / 1000)}\n{json.dumps(told)}\n"


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints.2"])
def test_starts_that_a_typo_ended_do_not_part_a_checkpoint_from_its_events(trained: Any, tmp_path: Path, place: str) -> None:
    run = run_folder(trained, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    checkpoint = (run / "checkpoints.1").rename(run / place) / "step-6"
    for number, seed, at in ((1, 111, 100), (3, 333, 300), (4, 444, 400)):
        config = json.loads((run / "config.json").read_text())
        config["run"]["seed"] = seed
        started = {"event": "started", "time": utc(at - 50), "config": config}
        (run / f"events.{number}.jsonl").write_text(f"{json.dumps(started)}\n{saved(checkpoint, at)}")
    for name in ("events.2.jsonl", "events.jsonl"):
        (run / name).write_text('{"event": "failed", "error": "config.json is not JSON"}\n')
    (run / "config.json").write_text("{")
    for at in (100, 300):
        saved(checkpoint, at)
        text = card(checkpoint, tmp_path / f"of-{at}")
        assert f'"seed": {at // 100 * 111}' in text
        assert f"- training batches, step 6: loss {at / 1000:.3f}, " in text
    saved(checkpoint, 320)  # a time at which nobody told of it: its start was killed, or it was copied
    assert "## " not in card(checkpoint, tmp_path / "unknown", "--target", str(trained.target))


def test_events_without_a_number_and_bytes_that_are_no_text_are_passed_over(trained: Any, tmp_path: Path) -> None:
    run = run_folder(trained, tmp_path / "run")
    odd = [step(4, 0.444), step(5, 0.555, None), '{"event": "step"}', '{"event": "step", "step": "6", "loss": 0.1}']
    (run / "events.jsonl").write_bytes(b'\xff\xfe{"event"\n' + "".join(f"{line}\n" for line in odd).encode())
    assert "- training batches, step 4: loss 0.444, " in card(run / "checkpoints" / "step-6", tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"acceptance_length": None},
        {"acceptance_length": {}},
        {"acceptance_length": {"mean": "2", "interval_95": None, "verifications": 4}},
        {"prompts": {}},
    ],
)
def test_half_an_evaluation_is_refused(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    document = {"checkpoint_sha256": checkpoint_digest(trained.checkpoint), "temperature": 0.0, "speedup": None}
    document |= {"acceptance_length": {"mean": 2.0, "interval_95": None, "verifications": 4}}
    document |= {"prompts": {"source": "chats.jsonl", "count": 7}}
    path = tmp_path / "evaluation.json"
    given = ["--target", str(trained.target), "--evaluation", str(path)]
    path.write_text(json.dumps(document))
    assert "- chats.jsonl, 7 prompts" in card(trained.checkpoint, tmp_path / "whole", *given)
    path.write_text(json.dumps(document | changes))
    capsys.readouterr()
    assert export.main(["--checkpoint", str(trained.checkpoint), "--output", str(tmp_path / "out"), *given]) == 3
    err = capsys.readouterr().err
    assert err.startswith(f"error: --evaluation {path} must be a whole document of `python -m trainer.evaluate`: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_data_that_say_nothing_of_themselves_are_left_out(trained: Any, tmp_path: Path) -> None:
    run = run_folder(trained, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["run"]["root"], config["data"]["path"] = str(tmp_path), "data"
    config["target"]["path"] = str(trained.target)
    (run / "config.json").write_text(json.dumps(config))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.json").write_text('{"format": "dflash-token-shards", "splits": 3}')
    assert "## Data" not in card(run / "checkpoints" / "step-6", tmp_path / "out")
