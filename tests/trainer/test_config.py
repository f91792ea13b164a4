"""A typo in a configuration fails with one sentence: where, what, allowed, got."""

import copy
from pathlib import Path
from typing import Any

import pytest

from trainer.config import TrainConfig, keys
from trainer.errors import ConfigError

GOOD: dict[str, Any] = {"target": {"path": "t"}, "data": {"path": "d"}}


def changed(key: str, value: object) -> dict[str, Any]:
    section, name = key.split(".")
    given = copy.deepcopy(GOOD)
    given.setdefault(section, {})[name] = value
    return given


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("draft.blok_size", 8, "draft: unknown key 'blok_size'; did you mean 'block_size'?"),
        ("drafts.block_size", 8, "trainer: unknown key 'drafts'; did you mean 'draft'?"),
        ("draft.block_size", 1, "draft.block_size must be 2..64, got 1"),
        ("draft.block_size", 8.0, "draft.block_size must be a whole number, got 8.0"),
        ("draft.block_size", True, "draft.block_size must be a whole number, got True"),
        ("draft.dtype", "float16", "draft.dtype must be one of float32, bfloat16, got 'float16'"),
        ("draft.target_layer_ids", [3, 1], "draft.target_layer_ids must be ascending layer indices from 0, got [3, 1]"),
        ("draft.target_layer_ids", [1, "2"], "draft.target_layer_ids[1] must be a whole number, got '2'"),
        ("optim.lr", "3e-4", "optim.lr must be a number, got '3e-4'"),
        ("optim.lr", 0, "optim.lr must be more than 0..1, got 0.0"),
        ("optim.lr", float("nan"), "optim.lr must be more than 0..1, got nan"),
        ("optim.beta1", 1, "optim.beta1 must be 0..1, 1 excluded, got 1.0"),
        ("optim.beta2", 1.5, "optim.beta2 must be 0..1, 1 excluded, got 1.5"),
        ("target.path", None, "target.path must be text, got None"),
        ("run.steps", 0, "run.steps must be at least 1, got 0"),
        ("pipeline.target_devices", [], "pipeline.target_devices must name at least one device, got []"),
        ("pipeline.target_devices", ["gpu0"], "pipeline.target_devices must hold 'cpu' or 'cuda:N', got 'gpu0'"),
        ("pipeline.target_devices", ["cpu"], "must all be cpu or all be cuda"),
        ("pipeline.graphs", "lazy", "crashes in cudagraph-trees"),
        ("pipeline.graphs", "mainwarm", "silently wrong"),
        ("optim.lr_warmup_steps", 1000, "optim.lr_warmup_steps must be below run.steps (1000), got 1000"),
        ("draft.layer_types", ["full_attention"], "draft.layer_types must name 5 layers, as draft.num_layers says, got"),
        (
            "draft.layer_types",
            ["full"] * 5,
            "draft.layer_types[0] must be one of full_attention, sliding_attention, got 'full'",
        ),
        ("draft.layer_types", ["sliding_attention"] * 5, "draft.sliding_window must be at least draft.block_size (16) for"),
        ("draft.sliding_window", 64, "draft.sliding_window needs a sliding_attention layer in draft.layer_types, got none"),
        ("draft.feature_noise", -1, "draft.feature_noise must be 0..10, got -1.0"),
        ("optim.optimizer", "sgd", "optim.optimizer must be one of adamw, muon, got 'sgd'"),
        ("optim.loss_weights", "linear", "optim.loss_weights must be one of decay, dpace, got 'linear'"),
        ("optim.loss_labels", "words", "optim.loss_labels must be one of tokens, logits, got 'words'"),
        ("prepare.input", "chats.jsonl", "prepare.input must be a list, got 'chats.jsonl'"),
        ("prepare.held_out", 1, "prepare.held_out must be 0..1, 1 excluded, got 1.0"),
        ("prepare.temperature", -1, "prepare.temperature must be at least 0, got -1.0"),
        ("prepare.rows", 0, "prepare.rows must be at least 1, got 0"),
        ("run.keep_checkpoints", 0, "run.keep_checkpoints must be at least 1, got 0"),
        ("prepare.max_tokens", 4000, "prepare.max_tokens must be at most batch.row_tokens (3072), got 4000"),
        ("draft.intermediate_size", 10**12, "draft.intermediate_size must be 1..1048576, got 1000000000000"),
        ("draft.num_attention_heads", 10**9, "draft.num_attention_heads must be 1..1024, got 1000000000"),
        ("draft.num_key_value_heads", 10**9, "draft.num_key_value_heads must be 1..1024, got 1000000000"),
        ("draft.head_dim", 10**9, "draft.head_dim must be 2..1024, got 1000000000"),
        pytest.param("optim.lr", 10**400, "optim.lr must be a number, got 1000000000", id="a float has no such number"),
        ("run.root", "\0", "run.root must be text of characters that a path can have, got '\\x00'"),
        ("run.resume", "a\ud800", "run.resume must be text of characters that a path can have, got 'a\\ud800'"),
        ("run.resume", "a/" * 2500, "run.resume must be at most 1024 characters, got 5000: 'a/a/"),
        ("prepare.input", ["b" * 5000], "prepare.input[0] must be at most 1024 characters, got 5000: 'bbb"),
        ("target.path", "a/" + "b" * 256, "target.path must have names of at most 255 bytes between its slashes, got 'a/bbb"),
        ("batch.row_tokens", 16, "draft.block_size must be below batch.row_tokens (16), got 16"),
    ],
)
def test_bad_values(key: str, value: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(changed(key, value))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"run":' * 100_000])
def test_what_is_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json is nested too deeply$"):
        TrainConfig.from_json(Path("config.json"), text)


@pytest.mark.parametrize("other", [{"loss_gamma": 7.0}, {"loss_labels": "logits"}])
def test_dpace_stands_alone(other: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"optim\.loss_weights: dpace cannot be had with optim\.loss_"):
        TrainConfig.from_dict(GOOD | {"optim": {"loss_weights": "dpace"} | other})


@pytest.mark.parametrize("given", [{"target": {"path": "t"}}, {"target": {"path": "t"}, "data": {}}])
def test_what_is_required_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^data\.path is required, got nothing$"):
        TrainConfig.from_dict(given)


@pytest.mark.parametrize("given", [[], "x", None, {"target": []}])
def test_what_is_no_mapping_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        TrainConfig.from_dict(given)


def test_graphs_exist_on_gpus_only() -> None:
    given = changed("pipeline.target_devices", ["cpu"])
    given["pipeline"]["drafter_devices"] = ["cpu"]
    with pytest.raises(ConfigError, match="must be none on cpu"):
        TrainConfig.from_dict(given)
    given["pipeline"]["graphs"] = "none"
    assert TrainConfig.from_dict(given).num_gpus == 0


def test_defaults_are_the_papers() -> None:
    config = TrainConfig.from_dict(GOOD)
    assert (config.optim.lr, config.optim.max_grad_norm, config.loss_gamma) == (6e-4, 1.0, 7.0)
    assert (config.draft.num_layers, config.draft.block_size, config.draft.num_anchors) == (5, 16, 512)
    assert config.token_budget == 16 * 3072
    assert config.lr_warmup_steps == 40
    assert config.num_gpus == 2


@pytest.mark.parametrize(("size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_gamma_follows_the_block_size(size: int, gamma: float) -> None:
    assert TrainConfig.from_dict(changed("draft.block_size", size)).loss_gamma == gamma


def test_what_is_written_reads_back_equal() -> None:
    config = TrainConfig.from_dict(changed("optim.lr", 1))
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert {f"{s}.{k}" for s, part in config.to_dict().items() for k in part} == set(keys())
