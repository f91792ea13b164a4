import errno
import json
import os

import pytest
import torch
from dflash.model import DFlashDraftModel
from safetensors import safe_open
from safetensors.torch import load_file

import trainer.checkpoint
from trainer.checkpoint import Staging, save_checkpoint
from trainer.errors import CheckpointError


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
