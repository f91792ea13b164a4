import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import trainer.drafter
import trainer.smoke
from trainer.errors import NonFiniteError
from trainer.smoke import main

INTERRUPTED = """
import os, runpy, signal, threading
import trainer.drafter, trainer.pipeline

def interrupted(*_, **__):
    os.kill(os.getpid(), signal.SIGNAL)
    threading.Event().wait()

trainer.pipeline.JOIN_S = 0.1
owner = trainer.pipeline if "STAGE" == "load_target" else trainer.drafter
owner.STAGE = interrupted
runpy.run_module("trainer.smoke", run_name="__main__")
"""


@pytest.fixture
def written(tiny_run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_run.config(drafters=2, run={"steps": 1000, "log_every": 100})))
    return path


def verdict_of(path, capsys):
    code = main([str(path)])
    out, err = capsys.readouterr()
    assert err == ""
    return code, json.loads(out)


def test_a_good_configuration_is_a_go_and_leaves_nothing_behind(written, tmp_path, capsys):
    code, verdict = verdict_of(written, capsys)
    assert (code, verdict["go"], verdict["reasons"]) == (0, True, [])
    assert verdict["losses"] == pytest.approx(verdict["eager_losses"], rel=1e-5)
    assert len(verdict["losses"]) == trainer.smoke.COMPARED_STEPS
    assert verdict["stages"].keys() == {"draft-0", "draft-1", "target-0"}
    assert verdict["stages"]["draft-0"]["first_step_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_losses_that_are_not_an_eager_loops_are_a_no_go(written, capsys, monkeypatch):
    plain = trainer.smoke.plain_losses
    monkeypatch.setattr(trainer.smoke, "plain_losses", lambda *args: [1.01 * loss for loss in plain(*args)])
    code, verdict = verdict_of(written, capsys)
    assert (code, verdict["go"]) == (1, False)
    assert verdict["reasons"] == ["losses must be within 0.001 of an eager loop's, got 0.0099"]


def test_a_run_that_dies_is_a_no_go_with_its_first_cause(written, capsys, monkeypatch):
    def broken(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trainer.drafter, "blocks_loss", broken)
    code, verdict = verdict_of(written, capsys)
    assert (code, verdict["go"]) == (1, False)
    assert verdict["reasons"] == ["the run died: RuntimeError: out of memory"]


@pytest.mark.parametrize("stage", ["load_all", "plain_losses"])
def test_a_death_before_or_after_the_run_is_a_no_go_too(written, capsys, monkeypatch, stage):
    def broken(*args):
        raise RuntimeError("out of memory")

    if stage == "load_all":
        monkeypatch.setattr(trainer.smoke.smoke, "__defaults__", (broken,))
    else:
        monkeypatch.setattr(trainer.smoke, stage, broken)
    code, verdict = verdict_of(written, capsys)
    assert (code, verdict["go"], verdict["reasons"]) == (1, False, ["the run died: RuntimeError: out of memory"])


def bad_inputs(tiny_run, folder):
    """A configuration file that the user can mend, what is said of it, and the code."""
    foreign = tiny_run.config(data={"path": "nowhere"})
    return {
        "none": (folder / "none.json", "none.json cannot be used", 3),
        "nested": ("[" * 100_000, "none.json is nested too deeply", 3),
        "unknown key": (tiny_run.config(run={"step": 3}), "run: unknown key 'step'; did you mean 'steps'?", 3),
        "no data": (foreign, "nowhere: no token shards here", 3),
        "no target": (tiny_run.config(target={"path": "nowhere"}), "target.path must be a folder or a hub id", 3),
    }


@pytest.mark.parametrize("name", ["none", "nested", "unknown key", "no data", "no target"])
def test_what_the_user_can_mend_is_one_sentence_and_still_a_document(tiny_run, tmp_path, capsys, name):
    given, text, code = bad_inputs(tiny_run, tmp_path)[name]
    path = tmp_path / "none.json"
    if not isinstance(given, Path):
        path.write_text(given if isinstance(given, str) else json.dumps(given))
    assert main([str(path)]) == code
    out, err = capsys.readouterr()
    assert text in err
    assert (err.startswith("error: "), err.count("\n")) == (True, 1)
    verdict = json.loads(out)
    assert (verdict["go"], [f"error: {reason}\n" for reason in verdict["reasons"]]) == (False, [err])


def test_a_loss_that_is_no_number_is_a_no_go(written, capsys, monkeypatch):
    def poisoned(*args, original=trainer.drafter.blocks_loss):
        loss, weights = original(*args)
        return dataclasses.replace(loss, loss_sum=loss.loss_sum * math.nan), weights

    monkeypatch.setattr(trainer.drafter, "blocks_loss", poisoned)
    assert main([str(written)]) == NonFiniteError.exit_code
    assert "loss and gradient must be finite" in json.loads(capsys.readouterr().out)["reasons"][0]


def test_a_long_warm_up_does_not_stand_in_the_way(tiny_run, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_run.config(optim={"lr_warmup_steps": 500}, run={"steps": 1000})))
    code, verdict = verdict_of(path, capsys)
    assert (code, verdict["reasons"]) == (0, [])


def test_what_a_run_goes_on_from_does_not_stand_in_the_way(tiny_run, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_run.config(run={"resume": "of/a/longer/run"})))
    code, verdict = verdict_of(path, capsys)
    assert (code, verdict["reasons"]) == (0, [])


def test_nothing_is_saved(written, capsys, monkeypatch):
    monkeypatch.setattr(trainer.drafter, "save_checkpoint", lambda *_: pytest.fail("a checkpoint was written"))
    assert verdict_of(written, capsys)[0] == 0


@pytest.mark.parametrize("stage", ["load_target", "blocks_loss"])
@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_has_its_code_and_still_a_document_and_nothing_is_left(tiny_run, tmp_path, stage, signal, code):
    path, driver, left = tmp_path / "config.json", tmp_path / "driver.py", tmp_path / "left"
    path.write_text(json.dumps(tiny_run.config()))
    driver.write_text(INTERRUPTED.replace("STAGE", stage).replace("SIGNAL", signal))
    left.mkdir()
    # a test run in the background of a script inherits an ignored SIGINT, and so would its children
    command = ["env", "--default-signal=INT", f"TMPDIR={left}", sys.executable, str(driver), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (code, "stopped\n")
    assert json.loads(done.stdout) == {"schema": 1, "go": False, "reasons": ["stopped"]}
    assert not list(left.iterdir())


def test_a_wrong_call_is_2(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err == "usage: python -m trainer.smoke CONFIG.json\n"
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == "usage: python -m trainer.smoke CONFIG.json\n"
