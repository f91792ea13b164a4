import json
import os
import subprocess
import sys

import pytest
import torch

from trainer.bench import main

SMALL = "--shape tiny --rows 2 --row-tokens 64 --anchors 4 --block-size 4 --layers 1 --dtype float32 --steps 8"


def test_a_run_is_measured_and_told_as_one_document():
    command = [sys.executable, "-m", "trainer.bench", "run", *SMALL.split(), "--graphs", "none"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    devices = ["--targets", "cpu", "--drafters", "cpu,cpu"]
    done = subprocess.run([*command, *devices], capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    measured = json.loads(done.stdout)
    assert len(measured["losses"]) == 4
    steady = measured["steady"]
    assert steady["steps_per_s"] * 2 * 2 * 64 == steady["context_tokens_per_s"], "every row is full"
    assert steady["stages"].keys() == {"target-0", "draft-0", "draft-1"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--rows", "0"], "error: batch.rows must be 1..4096, got 0"),
        (["run", "--targets", "gpu"], "error: pipeline.target_devices must hold 'cpu' or 'cuda:N', got 'gpu'"),
        (
            ["run", "--steps", "4", "--log-every", "4"],
            "error: --steps must be more than --log-every (4), got 4: rates are of what follows the first log line",
        ),
        (
            ["run", "--steps", "1"],
            "error: --steps must be more than --log-every (1), got 1: rates are of what follows the first log line",
        ),
        (["ceiling"], "error: ceiling: needs a GPU, and torch sees none here"),
    ],
)
def test_bad_input_is_one_sentence_and_3(arguments, sentence, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 3
    assert capsys.readouterr() == ("", sentence + "\n")
