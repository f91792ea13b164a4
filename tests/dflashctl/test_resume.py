"""`launch --resume`: a run that goes on from another's newest checkpoint, and says whose."""

import json
import os
import signal

import pytest

CHECKPOINT = """
import json, os, pathlib, sys
config = json.loads(pathlib.Path(sys.argv[1]).read_text())
print("resumes", config["run"]["resume"], flush=True)
for step in (5, 10):
    pathlib.Path(f"checkpoints/step-{step}").mkdir(parents=True)
os.symlink("step-10", "checkpoints/latest")
"""


@pytest.fixture
def trained(bench):
    bench.trainer(CHECKPOINT)
    assert bench("launch", "--tag", "quick", "--startup-seconds", "30").exit_code == 0
    return bench


def test_a_run_goes_on_from_the_newest_checkpoint_and_names_its_parent(trained) -> None:
    done = trained("launch", "--resume", "quick-1", "--startup-seconds", "30", "--json")
    assert done.exit_code == 0, done.stderr
    assert done.document["run"] == "quick-2"
    assert trained("tail", "quick-1").stdout == "resumes None\n"
    assert trained("tail", "quick-2").stdout == "resumes runs/quick-1/checkpoints/step-10\n"
    assert json.loads((trained.run_folder("quick-2") / "run.json").read_text())["resumes"] == "quick-1"
    assert json.loads((trained.run_folder("quick-1") / "run.json").read_text())["resumes"] is None


def test_another_tag_may_go_on_too(trained) -> None:
    trained.experiment("other")
    done = trained("launch", "--tag", "other", "--resume", "quick-1", "--startup-seconds", "30", "--json")
    assert (done.exit_code, done.document["run"]) == (0, "other-1")


def test_what_cannot_be_resumed_is_one_sentence(trained) -> None:
    assert "no run" in trained("launch", "--resume", "slow-1").stderr
    refused = trained("launch", "--resume", "quick-1", "--set", "run.resume=x")
    assert (refused.exit_code, "run.resume is set by --resume" in refused.stderr) == (3, True)
    other = trained("launch", "--resume", "quick-1", "--host", "elsewhere")
    assert (other.exit_code, "on its own host only" in other.stderr) == (2, True)
    nothing = trained("launch")
    assert (nothing.exit_code, "--tag, or --resume RUN" in nothing.stderr) == (2, True)
    trained.trainer("import time; print('no checkpoint'); time.sleep(600)")
    trained("launch", "--tag", "quick", "--startup-seconds", "0")
    living = trained("launch", "--resume", "quick-2")
    assert (living.exit_code, "is still living" in living.stderr) == (8, True)
    assert "hint: dflashctl tail quick-2 follows it, dflashctl stop quick-2 ends it\n" in living.stderr
    trained("stop", "quick-2")
    none = trained("launch", "--resume", "quick-2")
    assert (none.exit_code, "has no checkpoint" in none.stderr) == (8, True)
    assert not trained.run_folder("quick-3").exists()


def test_what_set_gave_a_run_goes_on_with_it(bench) -> None:
    bench.trainer(CHECKPOINT + "print(config['draft']['num_layers'], config['optim']['lr'], config['run']['steps'])")
    words = ("launch", "--startup-seconds", "30", "--json")
    assert bench(*words, "--tag", "quick", "--set", "draft.num_layers=1", "--set", "optim.lr=1e-5").exit_code == 0
    second = bench(*words, "--resume", "quick-1", "--set", "run.steps=7")
    assert "as quick-1 was set: draft.num_layers=1, optim.lr=1e-05\n" in second.stderr
    assert bench(*words, "--resume", "quick-2", "--set", "optim.lr=2e-5").exit_code == 0
    assert bench("tail", "quick-2").stdout.endswith("1 1e-05 7\n")
    assert bench("tail", "quick-3").stdout.endswith("1 2e-05 7\n")
    assert bench(*words, "--tag", "quick", "--set", "run.resume=elsewhere", "--set", "draft.num_layers=2").exit_code == 0
    assert bench(*words, "--resume", "quick-4").exit_code == 0
    assert bench("tail", "quick-5").stdout.startswith("resumes runs/quick-4/checkpoints/step-10\n2 ")
    bench.experiment("other")
    assert bench(*words, "--tag", "other", "--resume", "quick-1").exit_code == 0
    assert not bench("tail", "other-1").stdout.endswith("1 1e-05 7\n")


def test_a_run_of_which_the_trainer_outlives_its_wrapper_is_not_resumed_beside_it(bench) -> None:
    bench.trainer(f"{CHECKPOINT}\nprint('up', flush=True)\nimport time; time.sleep(600)")
    assert bench("launch", "--tag", "quick", "--startup-seconds", "0").exit_code == 0
    bench.until(lambda: "up" in bench("tail", "--no-follow").stdout)
    os.kill(int((bench.run_folder("quick-1") / "pid").read_text().split()[0]), signal.SIGKILL)
    (trainer,) = bench.marked("quick-1")
    done = bench("launch", "--resume", "quick-1")
    assert done.exit_code == 8
    assert f"run quick-1 has ended, but pid {trainer} (" in done.stderr
    assert "dflashctl stop quick-1 ends what it has left" in done.stderr
    assert bench("stop", "quick-1").exit_code == 0
    assert bench("launch", "--resume", "quick-1", "--startup-seconds", "0").exit_code == 0


def test_a_run_that_has_finished_is_not_resumed(trained) -> None:
    (trained.run_folder("quick-1") / "events.jsonl").write_text('{"event": "finished"}\n')
    done = trained("launch", "--resume", "quick-1")
    assert (done.exit_code, "quick-1 has finished all its steps" in done.stderr) == (8, True)
    assert not trained.run_folder("quick-2").exists()


def test_who_has_no_checkpoint_of_its_own_names_whose_it_went_on_from(trained) -> None:
    trained.trainer("print('no checkpoint')")
    assert trained("launch", "--resume", "quick-1", "--startup-seconds", "30").exit_code == 0
    done = trained("launch", "--resume", "quick-2")
    assert (done.exit_code, "hint: dflashctl launch --resume quick-1 " in done.stderr) == (8, True)
