import json

import pytest

import trainer.drafter
import trainer.smoke
from trainer.smoke import main


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

    monkeypatch.setattr(trainer.drafter, "drafter_loss", broken)
    code, verdict = verdict_of(written, capsys)
    assert (code, verdict["go"]) == (1, False)
    assert verdict["reasons"] == ["the run died: RuntimeError: out of memory"]


def test_what_the_user_can_mend_is_one_sentence(written, tmp_path, capsys):
    assert main([str(tmp_path / "none.json")]) == 3
    assert "none.json cannot be used" in capsys.readouterr().err
    config = json.loads(written.read_text())
    config["data"]["path"] = "nowhere"
    written.write_text(json.dumps(config))
    assert main([str(written)]) == 3
    assert "nowhere: no token shards here" in capsys.readouterr().err
    assert main([]) == 2
