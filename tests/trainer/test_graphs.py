import time

import pytest
import torch

from trainer.graphs import DeviceClock, Graphs, StageFacts

CPU = torch.device("cpu")


def test_on_the_cpu_a_body_is_what_runs_and_nothing_is_warmed_up():
    calls = []
    facts = StageFacts("cpu")
    graphs = Graphs("none", CPU, facts)
    graphs.warm_up(lambda: calls.append("warm"))
    body = lambda: calls.append("run")  # noqa: E731
    assert graphs.ready(body) is body
    assert calls == []
    assert (graphs.captures, facts.captures, facts.compile_s) == (False, 0, None)


def test_a_clock_adds_up_spans_and_knows_the_first_step():
    clock = DeviceClock(CPU, spans_per_step=2)
    for pause in (0.02, 0.01, 0.005):
        with clock.span():
            time.sleep(pause)
    assert clock.num_spans == 3
    assert 0.035 <= clock.busy_s < 5
    assert clock.first_step_s == pytest.approx(0.03, abs=0.004) or clock.first_step_s > 0.03
    assert clock.first_step_s < clock.busy_s
    clock.reset()
    assert (clock.busy_s, clock.num_spans, clock.first_step_s) == (0.0, 0, None)
