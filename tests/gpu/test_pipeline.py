"""The pipeline on GPUs: equal to a plain eager loop, still after the gate, dead at once with the first cause."""

import itertools
import math
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

import trainer.drafter
import trainer.forward
import trainer.pipeline
from trainer.errors import NonFiniteError
from trainer.graphs import Graphs, StageFacts
from trainer.reference import plain_losses

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ENDS_WITHIN_S = 10


class InjectedError(Exception):
    """What the tests break workers with."""


def losses_of(told):
    return [event["loss"] for event in told if event["event"] == "step"]


def assert_still(last):
    """Nothing happened after the gate that must not."""
    assert last["event"] == "finished"
    assert (last["captures_after_gate"], last["recompiles"]) == (0, 0)
    for gpu in last["gpus"].values():
        assert (gpu["device_allocs_after_gate"], gpu["alloc_retries_after_gate"]) == (0, 0)
    assert all(stage["addresses_unchanged"] for name, stage in last["stages"].items() if name.startswith("draft"))


@pytest.mark.parametrize("graphs", ["none", "threadwarm"])
@pytest.mark.parametrize(
    ("targets", "drafters"),
    [("0", "0"), ("0", "00"), pytest.param("0", "1", marks=two_gpus), pytest.param("01", "011", marks=two_gpus)],
)
def test_the_pipeline_is_a_plain_eager_loop(config, train, load, graphs, targets, drafters):
    run = config(targets, drafters, pipeline={"graphs": graphs})
    told = train(run)
    assert losses_of(told) == pytest.approx(plain_losses(run, load(run), 24), rel=1e-3)
    assert_still(told[-1])
    captures = told[-1]["captures_before_gate"]
    assert (captures > 0) == (graphs == "threadwarm")


def test_a_slot_each_has_its_graphs(config, train):
    told = train(config("0", "0", run={"steps": 3}, pipeline={"channel_capacity": 3}))
    assert told[-1]["captures_before_gate"] == 9, "of three slots the target's, the drafter's plain and its measured step"


@pytest.mark.parametrize("drafters", ["0", "00"])
def test_the_plain_step_teaches_what_the_measured_step_does(config, train, drafters):
    """Every step is measured, or every fourth is: the same training, and the same accuracy where it was measured."""
    every, some = (train(config("0", drafters, run={"log_every": n}), str(n)) for n in (1, 4))
    told = [{event["step"]: event for event in events if event["event"] == "step"} for events in (every, some)]
    assert list(told[1]) == [4, 8, 12, 16, 20, 24]
    for step, event in told[1].items():
        assert event["accuracy"] == pytest.approx(told[0][step]["accuracy"], abs=0.02)
        assert event["grad_norm"] == pytest.approx(told[0][step]["grad_norm"], rel=1e-3)
    assert every[-1]["draft_tokens"] == some[-1]["draft_tokens"] > 0
    assert_still(some[-1])


def test_graphs_of_a_worker_share_their_memory():
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    total = torch.zeros((), device=device)

    def body():
        total.add_(torch.ones(1 << 26, device=device).sum())

    with torch.cuda.stream(torch.cuda.Stream(device)):
        graphs = Graphs("threadwarm", device, StageFacts("cuda:0"))
        graphs.warm_up(body)
        first, one = graphs.ready(body), torch.cuda.memory_reserved()
        second, both = graphs.ready(body), torch.cuda.memory_reserved()
        total.zero_()
        first()
        second()
        torch.cuda.current_stream().synchronize()
    assert (both, total.item()) == (one, 2 * (1 << 26))


@pytest.mark.parametrize("drafters", ["0", "00"])
def test_looks_at_held_out_batches_are_replays_too(config, train, drafters):
    told = train(config("0", drafters, run={"steps": 8, "validate_every": 4, "validate_batches": 2}))
    assert_still(told[-1])
    looks = [event["loss"] for event in told if event["event"] == "validation"]
    assert len(looks) == 2
    assert all(math.isfinite(loss) for loss in looks)
    assert looks[1] != looks[0]


@two_gpus
def test_two_targets_and_six_drafters_over_two_gpus(config, train, tmp_path):
    told = train(config("01", "000111", run={"steps": 300, "log_every": 50, "checkpoint_every": 100}))
    assert_still(told[-1])
    assert losses_of(told)[-1] < losses_of(told)[0]
    assert [event["step"] for event in told if event["event"] == "checkpoint"] == [100, 200, 300], "checksums were equal"


def test_bf16_learns_as_fp32_does(config, train, load):
    run = config("0", "0", draft={"dtype": "bfloat16"}, target={"dtype": "bfloat16"})
    assert losses_of(train(run)) == pytest.approx(plain_losses(config("0", "0"), load(config("0", "0")), 24), rel=2e-2)


def fail_in(monkeypatch, owner, name, thread, when):
    """Raise in `owner.name` once `thread` calls it and `when()` holds; returns (the error, when it was raised)."""
    original, error, raised = getattr(owner, name), InjectedError(f"in {thread}"), []

    def wrapper(*args, **kwargs):
        if threading.current_thread().name == thread and when():
            raised.append(time.monotonic())
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)
    return error, raised


def assert_dies(train, run, error, raised, worker, tmp_path):
    with pytest.raises(InjectedError) as caught:
        train(run)
    assert caught.value is error
    assert time.monotonic() - raised[0] < ENDS_WITHIN_S
    assert f'"worker": "{worker}"' in (tmp_path / "events.jsonl").read_text().splitlines()[-1]
    alive = [t.name for t in threading.enumerate() if t.name.startswith(("load", "prefetch-", "target-", "draft-"))]
    assert alive == []


@pytest.mark.parametrize("moment", ["before", "inside"])
def test_a_drafter_that_dies_before_or_inside_its_capture(config, train, monkeypatch, tmp_path, moment):
    capturing = torch.cuda.is_current_stream_capturing
    when = capturing if moment == "inside" else lambda: True
    error, raised = fail_in(monkeypatch, trainer.drafter, "blocks_loss", "draft-1", when)
    assert_dies(train, config("0", "00"), error, raised, "draft-1", tmp_path)


@pytest.fixture
def wirings(monkeypatch):
    """The wiring of the runs that follow."""
    made, wire = [], trainer.pipeline.wire

    def recording(*args, **kwargs):
        made.append(wire(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(trainer.pipeline, "wire", recording)
    return made


def until(condition):
    deadline, pause = time.monotonic() + 60, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)


def test_a_drafter_that_dies_after_its_capture_while_the_channels_are_full(config, train, monkeypatch, tmp_path, wirings):
    steps = itertools.count()

    def late_and_full():
        if next(steps) != 5:
            return False
        features, batches = wirings[0].features[0, 0], wirings[0].batches[0]
        until(lambda: (features.statistics().depth, batches.statistics().depth) == (2, 2))
        waited = wirings[0].free[0, 0].statistics().receive_wait_s
        until(lambda: wirings[0].free[0, 0].statistics().receive_wait_s > waited)
        return True

    error, raised = fail_in(monkeypatch, trainer.drafter.Drafter, "train", "draft-0", late_and_full)
    assert_dies(train, config("0", "00", run={"steps": 100_000}), error, raised, "draft-0", tmp_path)


def test_a_target_that_dies_mid_run(config, train, monkeypatch, tmp_path):
    batches = itertools.count()
    late = lambda: next(batches) == 7  # noqa: E731
    error, raised = fail_in(monkeypatch, trainer.forward.TargetForward, "fill", "target-0", late)
    assert_dies(train, config("0", "00", run={"steps": 100_000}), error, raised, "target-0", tmp_path)


def test_a_nan_is_not_applied_and_ends_the_run_at_the_next_log_line(config, train, monkeypatch, tmp_path):
    original = trainer.forward.TargetForward._forward

    def poisoned(self, slot, batch):
        original(self, slot, batch)
        if threading.current_thread().name == "target-0" and batch.index == 6:
            slot.features.context_features.fill_(math.nan)

    monkeypatch.setattr(trainer.forward.TargetForward, "_forward", poisoned)
    with pytest.raises(NonFiniteError, match=r"step 7 \(batch 6\)"):
        train(config("0", "0", run={"log_every": 4, "checkpoint_every": 4}))
    saved = load_file(tmp_path / "checkpoints" / "step-4" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert not (tmp_path / "checkpoints" / "step-8").exists()


def test_a_capture_that_cannot_be_raises_its_first_cause():
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)

    def graphless():
        number = torch.ones(1, device=device)
        raise InjectedError(f"{number.shape}")

    with torch.cuda.stream(torch.cuda.Stream(device)), pytest.raises(InjectedError):
        Graphs("threadwarm", device, StageFacts("cuda:0")).ready(graphless)
