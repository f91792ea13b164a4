"""`dflashctl eval`: a run that measures another run's newest checkpoint."""

import json
import shutil

import pytest

TRAINER = """
import os, pathlib
pathlib.Path("checkpoints/step-10").mkdir(parents=True)
os.symlink("step-10", "checkpoints/latest")
"""
EVALUATE = """
import json, sys
json.dump(sys.argv[1:], open("arguments", "w"))
length = {"mean": 2.5312, "interval_95": [2.41, 2.66], "tokens": 100, "verifications": 40, "prompts": 4}
positions = [{"position": 1, "offered": 40, "accepted": 30, "share": 0.75}]
speeds = {"plain": 33.2, "speculative": 60.1}
print("loading")
print(json.dumps({"schema": 1, "acceptance_length": length, "accepted_by_position": positions, "tokens_per_s": speeds,
                  "speedup": 1.81, "equal_to_plain": 4, "prompts": {"count": 4}}))
"""


@pytest.fixture
def trained(bench):
    bench.trainer(TRAINER)
    bench.trainer(EVALUATE, "evaluate.py")
    assert bench("launch", "--tag", "quick", "--startup-seconds", "30").exit_code == 0
    return bench


def test_the_newest_checkpoint_is_measured_as_a_run(trained) -> None:
    done = trained("eval", "quick-1", "--limit", "4", "--temperature", "0.5")
    assert done.exit_code == 0, done.stderr
    assert "quick-eval-1: acceptance length 2.53 (2.41 to 2.66, 95 %), 40 verifications of 4 prompts" in done.stdout
    assert "1.81 times plain decoding: 60.1 against 33.2 tokens/s" in done.stdout
    words = json.loads((trained.run_folder("quick-eval-1") / "arguments").read_text())
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--root"] == str(trained.root)
    assert given["--checkpoint"] == "runs/quick-1/checkpoints/step-10"
    assert (given["--target"], given["--prompts"]) == ("targets/x", "/")
    assert (given["--limit"], given["--temperature"], given["--device"]) == ("4", "0.5", "cpu")
    document = trained("eval", "quick-1", "--prompts", "data/humaneval.jsonl", "--json").document
    assert (document["run"], document["of"]) == ("quick-eval-2", "quick-1")
    assert document["acceptance_length"]["mean"] == 2.5312
    assert "data/humaneval.jsonl" in (trained.run_folder("quick-eval-2") / "arguments").read_text()
    assert trained("runs").stdout.startswith("quick-eval-2\t")


def test_what_cannot_be_measured_is_one_sentence(trained) -> None:
    trained.trainer("import sys; sys.exit('error: no prompts here')", "evaluate.py")
    died = trained("eval", "quick-1")
    assert (died.exit_code, "no prompts here" in died.stderr) == (8, True)
    trained.trainer("print('nothing saved')")
    trained("launch", "--tag", "quick", "--startup-seconds", "30")
    none = trained("eval", "quick-2")
    assert (none.exit_code, "has no checkpoint" in none.stderr) == (8, True)
    (trained.run_folder("quick-1") / "config.json").write_text("{}")
    other = trained("eval", "quick-1")
    assert (other.exit_code, "is not one of this version" in other.stderr) == (8, True)


def test_a_real_drafter_is_measured_by_the_real_evaluator(bench, tiny_run) -> None:
    shutil.copytree(tiny_run.root, bench.root)
    config = tiny_run.config(run={"steps": 2})
    del config["run"]["root"]
    (bench.folder / "experiments/tiny.yaml").write_text(json.dumps({"hypothesis": "it trains", "trainer": config}))
    del bench.env["DFLASHCTL_TRAINER"]
    assert bench("launch", "--tag", "tiny", "--startup-seconds", "0", "--follow", timeout=300).exit_code == 0
    done = bench("eval", "tiny-1", "--limit", "2", "--max-new-tokens", "8", "--json", timeout=300)
    assert done.exit_code == 0, done.stderr
    length = done.document["acceptance_length"]
    assert length["prompts"] == 2
    assert length["mean"] == length["tokens"] / length["verifications"]
    assert 1 <= length["mean"] <= 8
    assert bench("status", "--json").document["last_event"] == "finished"
    assert (bench.run_folder("tiny-eval-1") / "evaluation.json").exists()
