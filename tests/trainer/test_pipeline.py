import dataclasses
import itertools
import math
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pipeline_runs import InjectedError, events_of, held_until, recording, run, workers_alive
from safetensors.torch import load_file

import trainer.drafter
import trainer.pipeline
import trainer.report
import trainer.wiring
from trainer.anchors import block_labels
from trainer.batch import Batch, FeatureBatch
from trainer.config import TrainConfig
from trainer.dataset import open_shards
from trainer.errors import CheckpointError, DataError
from trainer.gate import StartupGate
from trainer.loss import LossParts, drafter_loss
from trainer.model.attention import draft_mask
from trainer.model.draft import build_draft, forward_blocks, resolve_draft
from trainer.model.target import TargetModel, load_target
from trainer.optim import learning_rate
from trainer.packing import batches, packing_waste
from trainer.reference import plain_losses
from trainer.wiring import Mailbox


def plain_steps(config: TrainConfig, mask_token_id: int) -> list[tuple[float, float]]:
    """Loss and norm of the gradient by step: one thread, one model, torch's own optimizer, `drafters` batches a step."""
    root, num_batches = Path(config.run.root), len(config.pipeline.drafter_devices)
    target = load_target(config.target, root, torch.device("cpu"), config.draft)
    spec = resolve_draft(config.draft, target.info, mask_token_id)
    model = build_draft(spec, config.run.seed, torch.device("cpu"))
    assert config.optim.weight_decay == 0, "norms have none"
    optimizer = torch.optim.AdamW(model.parameters(), betas=(config.optim.beta1, config.optim.beta2), weight_decay=0.0)
    stream = batches(open_shards(root / config.data.path, "train"), config)
    seen = []
    for step in range(config.run.steps):
        optimizer.zero_grad()
        parts = [forward(batch, target, model, config) for batch in itertools.islice(stream, num_batches)]
        loss = torch.stack([part.loss_sum for part in parts]).sum() / torch.stack([part.weight_sum for part in parts]).sum()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(config, step)
        optimizer.step()
        seen.append((loss.item(), grad_norm.item()))
    return seen


def forward(batch: Batch, target: TargetModel, model: Any, config: TrainConfig) -> LossParts:
    size = config.draft.block_size
    features = FeatureBatch(batch=batch, context_features=target.context_features(batch))
    labels, weights = block_labels(batch, size, config.loss_gamma)
    hidden = forward_blocks(model, target.embedding, features, {None: draft_mask(batch, size)})
    return drafter_loss(hidden, target.head, labels, weights)


def test_rates_of_a_run_with_one_line_are_not_known(tiny_run: Any, tmp_path: Path) -> None:
    run(tiny_run.config(run={"log_every": 100}), tmp_path)
    last = events_of(tmp_path)[-1]
    assert (last["event"], last["steps"]) == ("finished", 6)
    assert [last[f"{what}_per_s"] for what in ("steps", "context_tokens", "draft_tokens")] == [None] * 3


@pytest.mark.parametrize(("targets", "drafters", "max_grad_norm"), [(1, 1, 1.0), (1, 3, 1.0), (2, 3, 1e6), (3, 2, 1.0)])
def test_the_pipeline_is_a_plain_loop(tiny_run: Any, tmp_path: Path, targets: int, drafters: int, max_grad_norm: float) -> None:
    config = tiny_run.config(targets=targets, drafters=drafters, optim={"max_grad_norm": max_grad_norm})
    run(config, tmp_path)
    steps = events_of(tmp_path, "step")
    assert [event["step"] for event in steps] == list(range(1, 7))
    opened = events_of(tmp_path, "gate_open")[0]
    assert opened["packing_waste"] == packing_waste(
        open_shards(tiny_run.root / "data", "train").lengths, TrainConfig.from_dict(config)
    )
    expected = plain_steps(TrainConfig.from_dict(config), opened["mask_token_id"])
    assert [event["loss"] for event in steps] == pytest.approx([loss for loss, _ in expected], rel=1e-5, abs=0)
    assert [event["grad_norm"] for event in steps] == pytest.approx([norm for _, norm in expected], rel=1e-4, abs=0)
    assert workers_alive() == []


RECIPES: dict[str, dict[str, dict[str, object]]] = {
    "dpace": {"optim": {"loss_weights": "dpace"}},
    "distillation": {"optim": {"loss_labels": "logits"}},
    "muon": {"optim": {"optimizer": "muon", "weight_decay": 0.1}},
    "noise": {"draft": {"feature_noise": 0.5}},
    "sliding": {
        "draft": {"num_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    },
    "blocks of 8": {"draft": {"block_size": 8}},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_a_plain_loop_too_and_not_the_default(tiny_run: Any, tmp_path: Path, recipe: str) -> None:
    losses = {}
    for name, sections in (("default", {}), (recipe, RECIPES[recipe])):
        (tmp_path / name).mkdir()
        config = tiny_run.config(drafters=2, **sections)
        run(config, tmp_path / name)
        losses[name] = [event["loss"] for event in events_of(tmp_path / name, "step")]
        settings = TrainConfig.from_dict(config)
        expected = plain_losses(settings, trainer.pipeline.load_all(settings), 6)
        assert losses[name] == pytest.approx(expected, rel=1e-4)
    assert losses[recipe] != pytest.approx(losses["default"], rel=1e-3)


def run_until_it_saves(config: dict[str, Any], folder: Path) -> None:
    """And is killed."""
    stop: Mailbox = queue.SimpleQueue()
    saved = trainer.drafter.save_checkpoint

    def saved_then_killed(*args: Any) -> Path:
        path = saved(*args)
        stop.put(InjectedError("killed"))
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.drafter, "save_checkpoint", saved_then_killed)
        with pytest.raises(InjectedError):
            run(config, folder, stop)


@pytest.mark.parametrize(("targets", "drafters", "recipe"), [(1, 1, "noise"), (2, 3, "muon")])
def test_a_resumed_run_goes_on_bit_for_bit(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: int, drafters: int, recipe: str
) -> None:
    def config(**run: object) -> dict[str, Any]:
        made: dict[str, Any] = tiny_run.config(targets=targets, drafters=drafters, run=run, **RECIPES[recipe])
        return made

    folders = [tmp_path / name for name in ("straight", "cut", "resumed")]
    for folder in folders:
        folder.mkdir()
    straight, cut, resumed = folders
    save, states = trainer.drafter.Drafter.save, []

    def remembered(drafter: Any, done: int) -> Path | None:
        states.append({name: tensor.clone() for name, tensor in drafter._optimizer.state_tensors().items()})
        return save(drafter, done)

    monkeypatch.setattr(trainer.drafter.Drafter, "save", remembered)
    run(config(), straight)
    run_until_it_saves(config(checkpoint_every=4), cut)
    run(config(resume=str(cut / "checkpoints" / "step-4")), resumed)
    losses = [
        [(event["step"], event["loss"], event["grad_norm"]) for event in events_of(f, "step")] for f in (straight, resumed)
    ]
    assert losses[1] == losses[0][4:]
    last = events_of(resumed)[-1]
    assert (last["step"], last["steps"]) == (6, 2)
    tensors = [(folder / "checkpoints" / "step-6" / "model.safetensors").read_bytes() for folder in (straight, resumed)]
    assert tensors[0] == tensors[1]
    assert states[0].keys() == states[-1].keys()
    assert all(torch.equal(tensor, states[-1][name]) for name, tensor in states[0].items())
    left = [list((folder / "checkpoints").rglob("training")) for folder in (straight, resumed)]
    assert left == [[], []], "nobody goes on from a last step"


def test_a_run_that_cannot_be_resumed_is_refused_before_it_starts(tiny_run: Any, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("finished", "cut")]
    for folder in folders:
        folder.mkdir()
    run(tiny_run.config(), folders[0])
    run_until_it_saves(tiny_run.config(run={"checkpoint_every": 4}), folders[1])
    finished, checkpoint = (str(folder / "checkpoints" / "latest") for folder in folders)
    changed = tmp_path / "changed"
    shutil.copytree(tiny_run.root, changed)
    wider = transformers.AutoConfig.from_pretrained(changed / "target", hidden_size=64, head_dim=16)
    transformers.LlamaForCausalLM(wider).save_pretrained(changed / "target")
    other = str(tiny_run.root / "target")
    for sections, sentence in (
        ({"run": {"resume": finished}}, "nothing to resume from, only the newest checkpoint of an unfinished run has"),
        ({"run": {"resume": checkpoint}, "target": {"path": other}}, "target.path must be what it was, 'target', got "),
        ({"run": {"resume": checkpoint}, "target": {"dtype": "bfloat16"}}, "target.dtype must be what it was, 'float32', got"),
        ({"run": {"resume": checkpoint, "steps": 9}}, "run.steps must be what it was, 6, got 9"),
        ({"run": {"resume": checkpoint, "seed": 1}}, "run.seed must be what it was, 0, got 1"),
        ({"run": {"resume": "no/where"}}, "no/where: nothing to resume from"),
        ({"run": {"resume": checkpoint, "root": str(changed)}}, "the drafter's hidden_size must be what it was, 32, got 64"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            run(tiny_run.config(**sections), tmp_path)
        assert events_of(tmp_path)[-1]["event"] == "failed"
        assert not (tmp_path / "checkpoints").exists()
        (tmp_path / "events.jsonl").unlink()


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
    assert [event["lr"] for event in events_of(tmp_path, "step")] == [
        pytest.approx(learning_rate(TrainConfig.from_dict(config), done - 1)) for done in (2, 4, 5)
    ]
    assert step["draft_tokens_per_s"] / step["context_tokens_per_s"] == pytest.approx(labels_per_token(config, 4))
    assert step["channel_depths"].keys() == {"batches-0", "features-0-0", "features-0-1"}
    assert step["wait_fractions"].keys() == {"prefetch-0", "target-0", "draft-0", "draft-1"}
    assert all(0 <= share <= 1 for ends in step["wait_fractions"].values() for share in ends.values())
    assert checkpoint["step"] == 3
    assert checkpoint["path"] == str(tmp_path / "checkpoints" / "step-3")
    last = events_of(tmp_path)[-1]
    tokens = sum(int((b.doc_ids >= 0).sum()) for b in first_batches(config, 10))
    assert (last["step"], last["steps"], last["context_tokens"]) == (5, 5, tokens)
    assert last["loss"] == events_of(tmp_path, "step")[-1]["loss"]
    assert (tmp_path / "checkpoints" / "latest").resolve() == tmp_path / "checkpoints" / "step-5"
    assert any(line.startswith("step 4/5  loss ") and line.endswith("ctx tok/s") for line in caplog.messages)


def test_a_log_line_has_the_loss_of_all_its_steps_and_the_accuracy_of_its_last(tiny_run: Any, tmp_path: Path) -> None:
    told = {}
    for log_every in (1, 3):
        folder = tmp_path / str(log_every)
        folder.mkdir()
        run(tiny_run.config(drafters=2, run={"steps": 7, "log_every": log_every}), folder)
        told[log_every] = {event["step"]: event for event in events_of(folder, "step")}
    assert list(told[3]) == [3, 6, 7]
    for step, event in told[3].items():
        assert (event["accuracy"], event["acceptance_length"]) == (
            told[1][step]["accuracy"],
            told[1][step]["acceptance_length"],
        )
        assert event["grad_norm"] == told[1][step]["grad_norm"]
    losses = [told[1][step]["loss"] for step in (1, 2, 3)]
    assert min(losses) < told[3][3]["loss"] < max(losses)
    tokens = [sum(e["draft_tokens"] for e in events_of(tmp_path / name, "finished")) for name in ("1", "3")]
    assert tokens[0] == tokens[1] > 0


def test_embedding_and_head_are_made_once_for_a_device(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(TargetModel, "ends", recording(TargetModel.ends, made))
    run(tiny_run.config(drafters=3, run={"steps": 1}), tmp_path)
    assert len(made) == 1


def labels_per_token(config: dict[str, Any], num_batches: int) -> float:
    found = first_batches(config, num_batches)
    num_labels = sum(int((block_labels(batch, config["draft"]["block_size"], 1.0)[1] > 0).sum()) for batch in found)
    return num_labels / sum(int((batch.doc_ids >= 0).sum()) for batch in found)


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
    config = tiny_run.config(draft={"num_anchors": 24}, run={"steps": 180, "log_every": 60, "checkpoint_every": 60})
    run(config, tmp_path)
    steps = events_of(tmp_path, "step")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    assert steps[-1]["accuracy"][0] > 0.5, "the token after the anchor's is the next number"
    first, last = (load_file(tmp_path / "checkpoints" / f"step-{n}" / "model.safetensors") for n in (60, 180))
    assert first.keys() == last.keys()
    assert not torch.equal(first["fc.weight"], last["fc.weight"])


def test_what_is_done_is_packed_again_before_the_gate(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def watched(*args: Any) -> Iterator[Batch]:
        stream = batches(*args)
        first = next(stream)
        seen.append([event["event"] for event in events_of(tmp_path)])
        yield from itertools.chain([first], stream)

    monkeypatch.setattr(trainer.pipeline, "batches", watched)
    monkeypatch.setattr(StartupGate, "pass_through", held_until(lambda: bool(seen), StartupGate.pass_through))
    run(tiny_run.config(), tmp_path)
    assert seen == [["started"]]


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 3)])
def test_held_out_batches_are_looked_at_and_teach_nothing(tiny_run: Any, tmp_path: Path, targets: int, drafters: int) -> None:
    steps, told = {"steps": 5}, []
    for name, more in (("without", {}), ("with", {"validate_every": 2, "validate_batches": 3})):
        (tmp_path / name).mkdir()
        run(tiny_run.config(targets=targets, drafters=drafters, run=steps | more), tmp_path / name)
        told.append([event["loss"] for event in events_of(tmp_path / name, "step")])
    assert told[0] == told[1]
    looks = events_of(tmp_path / "with", "validation")
    assert [look["step"] for look in looks] == [2, 4, 5]
    assert looks[0]["loss"] > looks[1]["loss"] > looks[2]["loss"]
    assert looks[0]["blocks"] == looks[2]["blocks"] > 0


@pytest.mark.parametrize("feature_noise", [0.0, 2.0])
def test_a_look_measures_the_drafter_as_it_is(tiny_run: Any, tmp_path: Path, feature_noise: float) -> None:
    """Without any noise, however much training adds."""
    looks = {"steps": 1, "validate_every": 1, "validate_batches": 2}
    sections = {"optim": {"lr": 1e-12}, "draft": {"feature_noise": feature_noise}, "run": looks}
    run(tiny_run.config(**sections), tmp_path)
    config = TrainConfig.from_dict(tiny_run.config(**sections))
    target = load_target(config.target, tiny_run.root, torch.device("cpu"), config.draft)
    spec = resolve_draft(config.draft, target.info, events_of(tmp_path, "gate_open")[0]["mask_token_id"])
    model = build_draft(spec, config.run.seed, torch.device("cpu"))
    stream = batches(open_shards(tiny_run.root / "data", "held_out"), config)
    parts = [forward(batch, target, model, config) for batch in itertools.islice(stream, 2)]
    expected = sum(part.loss_sum.item() for part in parts) / sum(part.weight_sum.item() for part in parts)
    assert events_of(tmp_path, "validation")[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_run_that_validates_needs_held_out_documents(tiny_run: Any, tmp_path: Path) -> None:
    tiny_run.write_shards("no-held-out", [[5, 6, 7, 8, 9, 10]])
    with pytest.raises(DataError, match="held_out: the data set is empty"):
        run(tiny_run.config(data={"path": "no-held-out"}, run={"validate_every": 2}), tmp_path)
