"""A run that was killed on a GPU goes on, once it is resumed, as the run that nobody killed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

pytestmark = pytest.mark.gpu
ENDS_WITHIN_S = 240


def losses_of(folder: Path) -> dict[int, float]:
    lines = (folder / "events.jsonl").read_text().splitlines() if (folder / "events.jsonl").exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 2e-2)])
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path, dtype, tolerance):
    made = tiny.make(tmp_path, hidden_size=128)
    device = {"target_devices": ["cuda:0"], "drafter_devices": ["cuda:0"], "graphs": "threadwarm"}

    def start(name, **run):
        (tmp_path / name).mkdir()
        config = made.config(
            target={"dtype": dtype},
            draft={"dtype": dtype, "num_anchors": 32, "feature_noise": 0.01},
            batch={"row_tokens": 256},
            optim={"lr": 1e-3, "lr_warmup_steps": 2},
            pipeline=device,
            run={"steps": 400, "checkpoint_every": 20} | run,
        )
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return subprocess.Popen([sys.executable, "-m", "trainer", str(tmp_path / name / "config.json")])

    straight, killed = start("straight"), start("killed")
    deadline, pause = time.monotonic() + ENDS_WITHIN_S, 0.005
    while max(losses_of(tmp_path / "killed"), default=0) < 100:
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(pause)
    killed.kill()
    killed.wait()
    assert straight.wait(ENDS_WITHIN_S) == 0
    latest = (tmp_path / "killed" / "checkpoints" / "latest").resolve()
    done = int(latest.name.removeprefix("step-"))
    assert 80 <= done < 400
    assert start("resumed", resume=str(latest)).wait(ENDS_WITHIN_S) == 0
    before, after = losses_of(tmp_path / "straight"), losses_of(tmp_path / "resumed")
    assert list(after) == list(range(done + 1, 401))
    assert after[done + 1] < before[1] / 2, "it does not begin anew"
    soon = range(done + 1, done + 21)  # noise grows from step to step
    assert [after[step] for step in soon] == pytest.approx([before[step] for step in soon], rel=tolerance, abs=tolerance)
