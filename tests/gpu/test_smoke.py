import pytest

from trainer.smoke import smoke

pytestmark = pytest.mark.gpu


def test_a_captured_run_is_a_go(config, load):
    verdict = smoke(config("0", "0"), load)
    assert verdict["reasons"] == []
    assert verdict["go"]
    draft = verdict["stages"]["draft-0"]
    assert draft["compile_s"] > draft["steady_step_s"]
    assert verdict["gpus"]["cuda:0"]["peak_gib"] > 0
