import dataclasses
import errno
import json
import os
import re

import pytest
import torch
from dflash.model import DFlashDraftModel
from safetensors import safe_open
from safetensors.torch import load_file

import trainer.checkpoint
from trainer.checkpoint import (
    Staging,
    TrainingState,
    check_trained_as,
    load_training_state,
    save_checkpoint,
    trained_for,
    trained_with,
)
from trainer.config import TrainConfig
from trainer.errors import CheckpointError
from trainer.optim import DraftOptimizer


@pytest.fixture
def model(make_spec, make_drafter):
    return make_drafter(make_spec())


def test_tensors_are_z_labs_in_bf16(model, target_info, tmp_path):
    folder = save_checkpoint(tmp_path, 12, Staging(model), target_info)
    assert folder == tmp_path / "step-12"
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layer = {
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
        "self_attn.q_proj": (64, 32),
        "self_attn.k_proj": (32, 32),
        "self_attn.v_proj": (32, 32),
        "self_attn.o_proj": (32, 64),
        "self_attn.q_norm": (16,),
        "self_attn.k_norm": (16,),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }
    expected = {"fc.weight": (32, 96), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    expected |= {f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    assert shapes == expected
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[name], tensor.bfloat16()), name
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_config_says_what_every_loader_reads(model, target_info, tmp_path):
    config = json.loads((save_checkpoint(tmp_path, 1, Staging(model), target_info) / "config.json").read_text())
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 8,
        "dflash_config": {"block_size": 4, "mask_token_id": 63, "target_layer_ids": [1, 3, 5]},
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention", "full_attention"],
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def test_it_loads_into_z_labs_class_with_nothing_missing_or_unexpected(model, target_info, tmp_path):
    folder = save_checkpoint(tmp_path, 1, Staging(model), target_info)
    judge, loaded = DFlashDraftModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded.values()), loaded
    assert judge.dtype == torch.bfloat16
    assert (judge.block_size, judge.mask_token_id, judge.target_layer_ids) == (4, 63, [1, 3, 5])
    assert judge.config.rope_parameters["rope_theta"] == 10000.0
    for name, tensor in judge.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16()), name


def test_latest_points_to_the_newest(model, target_info, tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (5, 10):
        save_checkpoint(folder, step, Staging(model), target_info)
        assert os.readlink(folder / "latest") == f"step-{step}"
        assert (folder / "latest" / "config.json").is_file()
    assert sorted(os.listdir(folder)) == ["latest", "step-10", "step-5"]


def test_a_full_disk_leaves_the_last_good_one(model, target_info, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 5, Staging(model), target_info)

    def full(_tensors, path, **_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(trainer.checkpoint, "save_file", full)
        with pytest.raises(CheckpointError, match=r"step-10: the checkpoint could not be written: .*No space left"):
            save_checkpoint(tmp_path, 10, Staging(model), target_info)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-5"]
    assert os.readlink(tmp_path / "latest") == "step-5"
    save_checkpoint(tmp_path, 10, Staging(model), target_info)
    assert os.readlink(tmp_path / "latest") == "step-10"


def test_a_checkpoint_is_never_overwritten(model, target_info, tmp_path):
    folder = save_checkpoint(tmp_path, 5, Staging(model), target_info)
    before = (folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.norm.weight.add_(1)
    with pytest.raises(CheckpointError, match="step-5: the checkpoint could not be written"):
        save_checkpoint(tmp_path, 5, Staging(model), target_info)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-5"]


CONFIG = TrainConfig.from_dict(
    {
        "target": {"path": "t"},
        "data": {"path": "d"},
        "optim": {"lr": 0.01, "weight_decay": 0.1},
        "run": {"steps": 6},
        "pipeline": {"target_devices": ["cpu"], "drafter_devices": ["cpu"], "graphs": "none"},
    }
)


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step(step, torch.tensor(2.0), torch.tensor(3.0))


def state_of(optimizer, step, config=CONFIG):
    return TrainingState(step=step, tensors=optimizer.state_tensors(), trained_with=trained_with(config, "d1"))


def test_what_is_resumed_goes_on_bit_for_bit(make_spec, make_drafter, target_info, tmp_path):
    straight, broken, fresh = (make_drafter(make_spec()) for _ in range(3))
    train(straight, DraftOptimizer(straight, CONFIG), range(6))
    optimizer = DraftOptimizer(broken, CONFIG)
    train(broken, optimizer, range(3))
    folder = save_checkpoint(tmp_path, 3, Staging(broken), target_info, state_of(optimizer, 3))
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    resumed = load_training_state(folder, trained_with(CONFIG, "d1"))
    optimizer = DraftOptimizer(fresh, CONFIG)
    addresses = [parameter.data_ptr() for parameter in fresh.parameters()]
    optimizer.hold(True)
    optimizer.step(0, torch.tensor(1.0), torch.tensor(1.0))  # as warming up does, before anything is restored
    optimizer.hold(False)
    optimizer.load_state_tensors(resumed.tensors)
    train(fresh, optimizer, range(resumed.step, 6))
    assert addresses == [parameter.data_ptr() for parameter in fresh.parameters()]
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name
    assert json.loads((folder / "training" / "state.json").read_text())["step"] == 3


def test_servers_see_no_tensors_but_the_drafters(model, target_info, tmp_path):
    folder = save_checkpoint(tmp_path, 1, Staging(model), target_info, state_of(DraftOptimizer(model, CONFIG), 1))
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize(("keep", "kept"), [(None, [1, 2, 10, 11]), (1, [11]), (3, [2, 10, 11])])
def test_the_newest_are_kept_and_the_newest_alone_is_resumed_from(model, target_info, tmp_path, keep, kept):
    optimizer = DraftOptimizer(model, CONFIG)
    for step in (1, 2, 10, 11):
        save_checkpoint(tmp_path, step, Staging(model), target_info, state_of(optimizer, step), keep)
    assert sorted(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*")) == kept
    assert [path.parent.name for path in tmp_path.glob("step-*/training")] == ["step-11"]
    assert load_training_state(tmp_path / "latest", {}).step == 11
    if keep is None:
        with pytest.raises(CheckpointError, match="step-10: nothing to resume from, only the newest checkpoint"):
            load_training_state(tmp_path / "step-10", {})


def test_what_others_put_beside_the_checkpoints_stays_and_ends_no_run(model, target_info, tmp_path):
    (tmp_path / "step-1-good").mkdir()
    (tmp_path / "step-").write_text("mine")
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, Staging(model), target_info, None, 1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-", "step-1-good", "step-3"]


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run_and_is_told(model, target_info, tmp_path, monkeypatch, caplog):
    save_checkpoint(tmp_path, 1, Staging(model), target_info)

    def refuse(path, **_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(trainer.checkpoint.shutil, "rmtree", lambda path, **more: more or refuse(path))
        save_checkpoint(tmp_path, 2, Staging(model), target_info, None, 1)
    assert os.readlink(tmp_path / "latest") == "step-2"
    assert "step-1 cannot be removed: " in caplog.text
    assert not (tmp_path / "step-1").exists(), "half of a checkpoint has no checkpoint's name"
    save_checkpoint(tmp_path, 3, Staging(model), target_info, None, 1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-3"]


def test_what_a_killed_save_has_left_goes_with_the_next(model, target_info, tmp_path):
    for name in (".step-4.partial", ".step-2.removed", ".step-2-training.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    save_checkpoint(tmp_path, 6, Staging(model), target_info)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-6"]


def test_a_disk_that_is_really_full_leaves_the_last_good_one(make_spec, make_drafter, target_info, tmpfs):
    model = make_drafter(make_spec())
    optimizer = DraftOptimizer(model, CONFIG)
    train(model, optimizer, range(1))
    state = sum(tensor.nbytes for tensor in optimizer.state_tensors().values())
    disk = tmpfs(f"size={state * 17 // 10}")
    save_checkpoint(disk, 1, Staging(model), target_info, state_of(optimizer, 1), 1)
    with pytest.raises(CheckpointError, match="step-2: the checkpoint could not be written"):
        save_checkpoint(disk, 2, Staging(model), target_info, state_of(optimizer, 2), 1)
    assert sorted(os.listdir(disk)) == ["latest", "step-1"]
    assert load_training_state(disk / "latest", trained_with(CONFIG, "d1")).step == 1


@pytest.mark.parametrize(
    ("section", "changes", "checksum", "sentence"),
    [
        ("draft", {"block_size": 8}, "d1", "draft.block_size must be what it was, 16, got 8"),
        ("optim", {"lr": 0.02}, "d1", "optim.lr must be what it was, 0.01, got 0.02"),
        ("run", {"steps": 9}, "d1", "run.steps must be what it was, 6, got 9"),
        ("target", {"dtype": "float32"}, "d1", "target.dtype must be what it was, 'bfloat16', got 'float32'"),
        ("run", {}, "d2", "checksum of data.path must be what it was, 'd1', got 'd2'"),
        ("pipeline", {"drafter_devices": ["cpu", "cpu"]}, "d1", "number of drafters must be what it was, 1, got 2"),
    ],
)
def test_what_was_trained_otherwise_is_not_gone_on_with(model, target_info, tmp_path, section, changes, checksum, sentence):
    folder = save_checkpoint(tmp_path, 1, Staging(model), target_info, state_of(DraftOptimizer(model, CONFIG), 1))
    given = CONFIG.to_dict()
    given[section] |= changes
    with pytest.raises(CheckpointError) as caught:
        load_training_state(folder, trained_with(TrainConfig.from_dict(given), checksum))
    assert str(caught.value) == f"run.resume {folder}: {sentence}"


def test_another_order_of_batches_is_not_gone_on_with(model, target_info, tmp_path, monkeypatch):
    folder = save_checkpoint(tmp_path, 1, Staging(model), target_info, state_of(DraftOptimizer(model, CONFIG), 1))
    monkeypatch.setattr(trainer.checkpoint, "ORDER", trainer.checkpoint.ORDER + 1)
    with pytest.raises(CheckpointError, match="the order of batches must be what it was, "):
        load_training_state(folder, trained_with(CONFIG, "d1"))


def test_another_target_under_the_old_name_is_not_gone_on_with(model, target_info, tmp_path):
    state = state_of(DraftOptimizer(model, CONFIG), 1)
    told = {**state.trained_with, **trained_for(model.spec, target_info)}
    folder = save_checkpoint(tmp_path, 1, Staging(model), target_info, dataclasses.replace(state, trained_with=told))
    state = load_training_state(folder, trained_with(CONFIG, "d1"))
    check_trained_as(folder, state, trained_for(model.spec, target_info))
    for spec, info, sentence in (
        (dataclasses.replace(model.spec, mask_token_id=62), target_info, "the drafter's mask_token_id .* 63, got 62"),
        (dataclasses.replace(model.spec, target_layer_ids=(1, 3, 4)), target_info, "the drafter's target_layer_ids"),
        (model.spec, dataclasses.replace(target_info, num_layers=9), "the target's num_layers must be what it was, 8, got 9"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            check_trained_as(folder, state, trained_for(spec, info))


def test_a_damaged_training_state_is_one_sentence(model, target_info, tmp_path):
    folder = save_checkpoint(tmp_path, 1, Staging(model), target_info, state_of(DraftOptimizer(model, CONFIG), 1))
    path = folder / "training" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="the training state cannot be read"):
        load_training_state(folder, {})
    for text in ("[]", "[" * 100_000):
        (folder / "training" / "state.json").write_text(text)
        with pytest.raises(CheckpointError, match="the training state cannot be read"):
            load_training_state(folder, {})


def test_tensors_that_are_not_those_that_were_saved_are_refused(model, target_info, tmp_path):
    folder = save_checkpoint(tmp_path, 1, Staging(model), target_info, state_of(DraftOptimizer(model, CONFIG), 1))
    path = folder / "training" / "state.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"damaged: the SHA-256 of state\.safetensors must be \w{64}, got \w{64}$"):
        load_training_state(folder, {})


@pytest.mark.parametrize(
    ("step", "expected", "sentence"),
    [
        (2, {}, "3, as its folder says, got 2"),
        (True, {}, "3, as its folder says, got True"),
        ("3", {}, "3, as its folder says, got '3'"),
        (None, {}, "3, as its folder says, got None"),
        (3, {"run.steps": 3}, "1..2, got 3"),
        (100, {"run.steps": 6}, "1..5, got 100"),
        (0, {}, "at least 1, got 0"),
    ],
)
def test_a_step_that_cannot_be_is_refused(model, target_info, tmp_path, step, expected, sentence):
    folder = save_checkpoint(tmp_path, 3, Staging(model), target_info, state_of(DraftOptimizer(model, CONFIG), 3))
    if not sentence.startswith("3"):
        folder = folder.rename(tmp_path / "mine")
    path = folder / "training" / "state.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"step": step, "trained_with": expected}))
    with pytest.raises(CheckpointError) as caught:
        load_training_state(folder, expected)
    assert str(caught.value) == f"run.resume {folder}: step in state.json must be {sentence}"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_only_the_tensors_of_an_equal_drafter_are_gone_on_with(make_spec, make_drafter, optimizer):
    config = TrainConfig.from_dict(CONFIG.to_dict() | {"optim": {"optimizer": optimizer}})
    donor, model = (make_drafter(make_spec(), seed) for seed in (0, 1))
    trained, fresh = DraftOptimizer(donor, config), DraftOptimizer(model, config)
    train(donor, trained, range(2))
    fresh.hold(True)
    train(model, fresh, range(1))
    good = trained.state_tensors()
    before = {name: tensor.clone() for name, tensor in fresh.state_tensors().items()}
    statistic = "exp_avg/norm.weight" if optimizer == "adamw" else "momentum_buffer/fc.weight"
    shape = list(good[statistic].shape)
    for tensors, sentence in (
        ({}, "in the training state must be float32"),
        (
            {k: v for k, v in good.items() if k != "parameter/fc.weight"},
            "parameter/fc.weight .* must be float32 .*, got nothing",
        ),
        ({k: v for k, v in good.items() if k != statistic}, f"{statistic} .* must be float32 .*, got nothing"),
        (good | {"parameter/extra": torch.ones(1)}, r"parameter/extra .* must be nothing, got float32 \[1\]"),
        (good | {"exp_avg": torch.ones(1)}, r"exp_avg in the training state must be nothing, got float32 \[1\]"),
        (good | {statistic: torch.ones(7)}, rf"{statistic} .* must be float32 {re.escape(str(shape))}, got float32 \[7\]"),
        (good | {statistic: good[statistic].double()}, f"{statistic} .* must be float32 .*, got float64"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            fresh.load_state_tensors(tensors)
        assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_tensors().items())
    fresh.load_state_tensors(good)
    assert all(torch.equal(tensor, good[name]) for name, tensor in fresh.state_tensors().items())
