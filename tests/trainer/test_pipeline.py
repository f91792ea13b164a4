import dataclasses
import itertools
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trainer.drafter
import trainer.pipeline
import trainer.wiring
from trainer.anchors import block_labels
from trainer.batch import Batch, FeatureBatch
from trainer.channel import Channel
from trainer.config import TrainConfig
from trainer.dataset import open_shards
from trainer.errors import NonFiniteError, WorkerError
from trainer.events import EventLog
from trainer.loss import LossParts, drafter_loss
from trainer.model.attention import draft_mask
from trainer.model.draft import build_draft, forward_blocks, resolve_draft
from trainer.model.target import TargetModel, load_target
from trainer.optim import DraftOptimizer
from trainer.packing import batches
from trainer.wiring import Mailbox

ENDS_WITHIN_S = 30
"""Far more than an end takes; a run that hangs takes half an hour."""


class InjectedError(Exception):
    """What the tests break workers with."""


def run(config: dict[str, Any], folder: Path, mailbox: Mailbox | None = None) -> None:
    log = EventLog(folder / "events.jsonl")
    try:
        trainer.pipeline.train(TrainConfig.from_dict(config), folder, log, mailbox)
    finally:
        log.close()


def events_of(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if kind in (None, event["event"])]


def workers_alive() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("load", "prefetch-", "target-", "draft-"))]


def plain_losses(config: TrainConfig, mask_token_id: int) -> list[float]:
    """One thread, one model, `drafters` batches accumulated a step."""
    root, num_batches = Path(config.run.root), len(config.pipeline.drafter_devices)
    target = load_target(config.target, root, torch.device("cpu"), config.draft)
    spec = resolve_draft(config.draft, target.info, mask_token_id)
    model = build_draft(spec, config.run.seed, torch.device("cpu"))
    optimizer = DraftOptimizer(model, config)
    stream = batches(open_shards(root / config.data.path, "train"), config)
    losses = []
    for step in range(config.run.steps):
        optimizer.zero_grad()
        parts = [accumulate(batch, target, model, config) for batch in itertools.islice(stream, num_batches)]
        loss_sum, weight_sum = (torch.stack(sums).sum() for sums in zip(*parts, strict=True))
        optimizer.step(step, loss_sum, weight_sum)
        losses.append((loss_sum / weight_sum).item())
    return losses


def accumulate(batch: Batch, target: TargetModel, model: Any, config: TrainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    size = config.draft.block_size
    features = FeatureBatch(batch=batch, context_features=target.context_features(batch))
    labels, weights = block_labels(batch, size, config.loss_gamma)
    hidden = forward_blocks(model, target.embedding, features, draft_mask(batch, size))
    loss = drafter_loss(hidden, target.head, labels, weights)
    loss.loss_sum.backward()
    return loss.loss_sum.detach(), loss.weight_sum


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (1, 3), (2, 3), (3, 2)])
def test_the_pipeline_is_a_plain_loop(tiny_run: Any, tmp_path: Path, targets: int, drafters: int) -> None:
    config = tiny_run.config(targets=targets, drafters=drafters)
    run(config, tmp_path)
    steps = events_of(tmp_path, "step")
    assert [event["step"] for event in steps] == list(range(1, 7))
    expected = plain_losses(TrainConfig.from_dict(config), events_of(tmp_path, "gate_open")[0]["mask_token_id"])
    assert [event["loss"] for event in steps] == pytest.approx(expected, rel=1e-6, abs=0)
    assert workers_alive() == []


def test_a_run_tells_its_whole_story(tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainer")
    config = tiny_run.config(drafters=2, run={"steps": 5, "log_every": 2, "checkpoint_every": 3})
    run(config, tmp_path)
    assert [e["event"] for e in events_of(tmp_path)] == [
        *("started", "gate_open", "step", "checkpoint", "step", "steady", "step", "checkpoint", "finished")
    ]
    started, gate_open, step, checkpoint = events_of(tmp_path)[:4]
    assert started["versions"]["torch"] == torch.__version__
    assert started["config"]["run"]["steps"] == 5
    assert started["devices"].keys() == {"cpu"}
    assert (gate_open["documents"], gate_open["mask_token_id"], gate_open["target_layer_ids"]) == (40, 60, [1, 2])
    assert len(step["accuracy"]) == 3
    assert step["acceptance_length"] >= 1
    assert step["context_tokens_per_s"] > step["draft_tokens_per_s"] > 0
    assert step["channel_depths"].keys() == {"batches-0", "features-0-0", "features-0-1"}
    assert step["wait_fractions"].keys() == {"prefetch-0", "target-0", "draft-0", "draft-1"}
    assert all(0 <= share <= 1.01 for ends in step["wait_fractions"].values() for share in ends.values())
    assert checkpoint["step"] == 3
    assert checkpoint["path"] == str(tmp_path / "checkpoints" / "step-3")
    last = events_of(tmp_path)[-1]
    tokens = sum(int((b.doc_ids >= 0).sum()) for b in first_batches(config, 10))
    assert (last["steps"], last["loss"], last["context_tokens"]) == (5, events_of(tmp_path, "step")[-1]["loss"], tokens)
    assert (tmp_path / "checkpoints" / "latest").resolve() == tmp_path / "checkpoints" / "step-5"
    assert any(line.startswith("step 4/5  loss ") and line.endswith("ctx tok/s") for line in caplog.messages)


def first_batches(config: dict[str, Any], count: int) -> list[Batch]:
    parsed = TrainConfig.from_dict(config)
    return list(itertools.islice(batches(open_shards(Path(parsed.run.root) / "data", "train"), parsed), count))


def test_a_batch_without_anchors_takes_part_with_zero_weight(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blinded(*args: Any) -> Iterator[Batch]:
        for batch in batches(*args):
            blind = batch.index % 2 == 1 or batch.index == 4
            yield dataclasses.replace(batch, anchor_valid=batch.anchor_valid & (not blind), index=batch.index)

    monkeypatch.setattr(trainer.pipeline, "batches", blinded)
    run(tiny_run.config(drafters=2, run={"steps": 4}), tmp_path)
    losses = [event["loss"] for event in events_of(tmp_path, "step")]
    assert losses[2] is None
    assert all(math.isfinite(loss) for i, loss in enumerate(losses) if i != 2)
    assert events_of(tmp_path)[-1]["event"] == "finished"


def test_training_learns_and_saves_what_it_learnt(tiny_run: Any, tmp_path: Path) -> None:
    config = tiny_run.config(run={"steps": 60, "log_every": 20, "checkpoint_every": 20})
    run(config, tmp_path)
    losses = [event["loss"] for event in events_of(tmp_path, "step")]
    assert losses[-1] < losses[0] - 0.2
    first, last = (load_file(tmp_path / "checkpoints" / f"step-{n}" / "model.safetensors") for n in (20, 60))
    assert first.keys() == last.keys()
    assert not torch.equal(first["fc.weight"], last["fc.weight"])


def fail_in(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, thread: str, call: int, error: BaseException, first: Any = None
) -> None:
    """Raise in the given call of `owner.name` that `thread` makes, after calling `first`; the dry run is call 1."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == thread and next(calls) == call:
            if first is not None:
                first()
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


def expect_failure(config: dict[str, Any], folder: Path, worker: str | None, error: BaseException) -> dict[str, Any]:
    began = time.monotonic()
    with pytest.raises(type(error)) as caught:
        run(config, folder)
    assert caught.value is error
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert workers_alive() == []
    last = events_of(folder)[-1]
    assert (last["event"], last["worker"]) == ("failed", worker)
    assert str(error) in last["error"]
    return last


@pytest.mark.parametrize(
    ("owner", "name", "thread"),
    [
        (trainer.pipeline, "open_shards", "load"),
        (trainer.pipeline, "load_target", "load"),
        (TargetModel, "context_features", "target-1"),
        (trainer.drafter, "copy_draft", "draft-1"),
        (trainer.drafter, "drafter_loss", "draft-0"),
    ],
)
def test_a_death_before_the_gate_ends_the_run(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, thread: str
) -> None:
    error = InjectedError(f"in {thread}")
    fail_in(monkeypatch, owner, name, thread, 1, error)
    last = expect_failure(tiny_run.config(targets=2, drafters=2), tmp_path, thread, error)
    assert last["step"] is None
    assert [event["event"] for event in events_of(tmp_path)] == ["started", "failed"]


def test_a_prefetcher_that_dies_ends_the_run(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = InjectedError("no more")

    def dying(*args: Any) -> Iterator[Batch]:
        yield from itertools.islice(batches(*args), 5)
        raise error

    monkeypatch.setattr(trainer.pipeline, "batches", dying)
    last = expect_failure(tiny_run.config(drafters=2, run={"steps": 10_000}), tmp_path, "prefetch-0", error)
    assert last["step"] == 3


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Channel[Any]]:
    """The channels of the next run, by name."""
    made: dict[str, Channel[Any]] = {}

    def make(name: str, capacity: int) -> Channel[Any]:
        return made.setdefault(name, Channel(name, capacity))

    monkeypatch.setattr(trainer.wiring, "Channel", make)
    return made


def until(condition: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + ENDS_WITHIN_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)


def test_a_drafter_that_dies_while_the_target_sends_ends_the_run(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: dict[str, Channel[Any]]
) -> None:
    def target_waits_for_room() -> None:
        before = channels["free-0-0"].statistics().receive_wait_s
        until(lambda: channels["free-0-0"].statistics().receive_wait_s > before + 0.02)

    error = InjectedError("mid-send")
    fail_in(monkeypatch, trainer.drafter, "drafter_loss", "draft-0", 3, error, first=target_waits_for_room)
    last = expect_failure(tiny_run.config(run={"steps": 10_000}), tmp_path, "draft-0", error)
    assert last["step"] == 2


def test_a_target_that_dies_while_the_drafter_waits_ends_the_run(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: dict[str, Channel[Any]]
) -> None:
    def drafter_waits_for_features() -> None:
        before = channels["features-0-0"].statistics().receive_wait_s
        until(lambda: channels["features-0-0"].statistics().receive_wait_s > before + 0.02)

    error = InjectedError("starved")
    fail_in(monkeypatch, TargetModel, "context_features", "target-0", 4, error, first=drafter_waits_for_features)
    last = expect_failure(tiny_run.config(run={"steps": 10_000}), tmp_path, "target-0", error)
    assert last["step"] == 3


def test_a_drafter_that_dies_after_the_others_have_left_ends_the_run(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = InjectedError("after close")
    alone = lambda: until(lambda: workers_alive() == ["draft-0"])  # noqa: E731
    fail_in(monkeypatch, trainer.drafter, "drafter_loss", "draft-0", 2, error, first=alone)
    config = tiny_run.config(pipeline={"channel_capacity": 64})
    assert expect_failure(config, tmp_path, "draft-0", error)["step"] == 1


def test_a_drafter_that_dies_while_others_wait_for_it_ends_the_run(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meetings: list[Any] = []
    monkeypatch.setattr(trainer.wiring, "DrafterSum", recording(trainer.wiring.DrafterSum, meetings))
    others_wait = lambda: until(lambda: meetings[0]._barrier.n_waiting == 2)  # noqa: E731
    error = InjectedError("in the barrier")
    fail_in(monkeypatch, trainer.drafter, "drafter_loss", "draft-1", 4, error, first=others_wait)
    last = expect_failure(tiny_run.config(drafters=3, run={"steps": 10_000}), tmp_path, "draft-1", error)
    assert last["step"] == 3


def recording(kind: Callable[..., Any], made: list[Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(kind(*args, **kwargs))
        return made[-1]

    return make


def test_drafters_that_drift_apart_end_the_run(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = trainer.drafter.copy_draft

    def copied(initial: Any, device: torch.device) -> Any:
        model = original(initial, device)
        if threading.current_thread().name == "draft-1":
            with torch.no_grad():
                model.norm.weight[0] += 1e-3
        return model

    monkeypatch.setattr(trainer.drafter, "copy_draft", copied)
    with pytest.raises(AssertionError, match="drafters are not bit-equal"):
        run(tiny_run.config(drafters=2, run={"checkpoint_every": 2}), tmp_path)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("thread", ["draft-0", "draft-1"])
def test_a_loss_that_is_not_a_number_ends_the_run_and_is_not_applied(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    calls = itertools.count(1)

    def poisoned(*args: Any) -> LossParts:
        loss = drafter_loss(*args)
        bad = threading.current_thread().name == thread and next(calls) == 4
        return dataclasses.replace(loss, loss_sum=loss.loss_sum * math.nan) if bad else loss

    monkeypatch.setattr(trainer.drafter, "drafter_loss", poisoned)
    with pytest.raises(NonFiniteError, match=r"step \d .*batches 4\.\.5"):
        run(tiny_run.config(drafters=2), tmp_path)
    last = events_of(tmp_path)[-1]
    assert (last["event"], last["step"]) == ("failed", 3)
    assert [event["step"] for event in events_of(tmp_path, "step")] == [1, 2]


def test_a_message_from_outside_stops_a_run(tiny_run: Any, tmp_path: Path) -> None:
    mailbox: Mailbox = queue.SimpleQueue()
    stop = threading.Thread(target=stop_after_first_step, args=(tmp_path, mailbox))
    stop.start()
    with pytest.raises(InjectedError):
        run(tiny_run.config(run={"steps": 10_000}), tmp_path, mailbox)
    stop.join(ENDS_WITHIN_S)
    last = events_of(tmp_path)[-1]
    assert (last["event"], last["worker"]) == ("failed", None)
    assert last["step"] >= 1
    assert workers_alive() == []


def stop_after_first_step(folder: Path, mailbox: Mailbox) -> None:
    until(lambda: (folder / "events.jsonl").exists() and '"step"' in (folder / "events.jsonl").read_text())
    mailbox.put(InjectedError("enough"))


def test_a_run_in_which_nothing_moves_ends(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    original = trainer.drafter.drafter_loss

    def hanging(*args: Any) -> LossParts:
        release.wait(ENDS_WITHIN_S)
        return original(*args)

    monkeypatch.setattr(trainer.drafter, "drafter_loss", hanging)
    monkeypatch.setattr(trainer.pipeline, "STALL_S", 0.5)
    monkeypatch.setattr(trainer.pipeline, "JOIN_S", 0.1)
    with pytest.raises(WorkerError, match=r"no worker has moved for 0\.5 s: .*draft-0"):
        run(tiny_run.config(), tmp_path)
    assert events_of(tmp_path)[-1]["event"] == "failed"
    release.set()
    until(lambda: workers_alive() == [])
