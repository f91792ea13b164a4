"""What is exported is judged by the classes of others, out of their own wheels."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainer import export
from trainer.checkpoint import checkpoint_digest, load_checkpoint
from trainer.model.target import target_info

SPECULATORS = """
import json, sys
from unittest.mock import MagicMock
for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets"):
    sys.modules[name] = MagicMock(__path__=[], __spec__=None)  # what its package imports for clients and data, not for models
from speculators.models.dflash import DFlashDraftModel
from safetensors.torch import load_file
model, loaded = DFlashDraftModel.from_pretrained(sys.argv[1], output_loading_info=True)
saved, held = load_file(sys.argv[1] + "/model.safetensors"), model.state_dict()
print(json.dumps({
    "told": {key: sorted(value) for key, value in loaded.items()},
    "equal": all(held[name].equal(tensor) for name, tensor in saved.items()),
    "layers": model.target_layer_ids,
    "block_size": model.block_size,
    "mask_token_id": model.config.mask_token_id,
    "rope_theta": model.rotary_emb.config.rope_parameters["rope_theta"],
    "tokens": model.config.speculators_config.proposal_methods[0].speculative_tokens,
    "verifier": model.config.speculators_config.verifier.architectures,
}))
"""


def call(trained: Any, output: Path, *more: str) -> int:
    return export.main(["--checkpoint", str(trained.checkpoint), "--output", str(output), *more])


@pytest.mark.filterwarnings("ignore")  # of the packages that the judges import
@pytest.mark.parametrize("module", ["dflash.model", "specforge.modeling.draft.dflash"])
@torch.no_grad()
def test_flat_loads_and_computes_in_the_classes_of_others(trained: Any, tmp_path: Path, module: str) -> None:
    assert call(trained, tmp_path / "out", "--target", str(trained.target)) == 0
    judge = importlib.import_module(module).DFlashDraftModel
    model, loaded = judge.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(loaded.values()), loaded
    ours = load_checkpoint(tmp_path / "out", target_info(trained.model), torch.float32)
    context, block = torch.randn(1, 5, 64), torch.randn(1, 4, 32)
    positions = torch.arange(9)[None]
    theirs = model.eval()(position_ids=positions, noise_embedding=block, target_hidden=context)
    torch.testing.assert_close(
        ours(context, positions[:, :5], block, positions[:, 5:], {None: None}), theirs, rtol=1e-5, atol=1e-5
    )


def test_speculators_format_loads_with_nothing_missing_or_unexpected(trained: Any, tmp_path: Path) -> None:
    assert call(trained, tmp_path / "out", "--format", "speculators", "--target", str(trained.target)) == 0
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SPECULATORS, tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    judged = json.loads(done.stdout)
    assert not any(judged.pop("told").values())
    assert judged == {
        "equal": True,
        "layers": [2, 3],
        "block_size": 4,
        "mask_token_id": 60,
        "rope_theta": 10000.0,
        "tokens": 3,
        "verifier": ["LlamaForCausalLM"],
    }


def test_the_causality_that_speculators_reads_is_that_of_the_layers() -> None:
    flat = {
        "block_size": 8,
        "vocab_size": 64,
        "dtype": "bfloat16",
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0]},
    }
    for layers, non_causal in ((["full_attention"], True), (["sliding_attention"], False)):
        written = export.speculators_config(flat | {"layer_types": layers}, "target", "LlamaForCausalLM")
        assert written["sliding_window_non_causal"] is non_causal


def test_the_card_says_data_recipe_and_numbers(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    config = json.loads((trained.target.parent / "run.json").read_text())
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "latest").symlink_to(trained.checkpoint.resolve())
    config["run"] |= {"root": str(trained.target.parent), "resume": "elsewhere/checkpoints/step-3"}
    (run / "checkpoints" / "step-150").mkdir()
    for name in ("config.json", "model.safetensors"):
        (run / "checkpoints" / "step-150" / name).write_bytes((trained.checkpoint / name).read_bytes())
    (run / "config.json").write_text(json.dumps(config))
    later = json.dumps({"event": "step", "step": 160, "loss": 0.125, "acceptance_length": 3.0})
    look = json.dumps({"event": "validation", "step": 160, "loss": 0.125, "acceptance_length": 3.0})
    (run / "events.jsonl").write_text((trained.target.parent / "events.jsonl").read_text() + f"{later}\n{look}\n")
    accepted = {"mean": 2.5, "interval_95": [2.25, 2.75], "verifications": 40}
    measured = {"acceptance_length": accepted, "prompts": {"source": "/x/chats.jsonl", "count": 7}, "temperature": 0.0}
    measured |= {"checkpoint": "some/where", "checkpoint_sha256": checkpoint_digest(trained.checkpoint), "speedup": 1.5}
    (tmp_path / "evaluation.json").write_text(json.dumps(measured))
    given = ["--checkpoint", str(run / "checkpoints" / "step-150"), "--output", str(tmp_path / "out")]
    assert export.main([*given, "--evaluation", str(tmp_path / "evaluation.json")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# DFlash drafter for target\n" in card
    assert "1 layers, blocks of 4 (3 draft tokens), reading layers 1, 2 of the target's 4." in card
    count = len(trained.prompts)
    assert f"- train: {count} conversations, " in card
    assert '"num_anchors": 24' in card
    assert not any(word in card for word in ("elsewhere", '"root"', str(tmp_path), str(trained.target.parent)))
    assert "- training batches, step 150: loss " in card
    assert (
        "- chats.jsonl, 7 prompts, temperature 0: acceptance length 2.50 (95 % 2.25..2.75) over 40 verifications, "
        "1.50 times plain decoding's tokens/s\n"
    ) in card
    assert "160" not in card, "that is a later checkpoint's"
    assert "held-out split" not in card
    (tmp_path / "evaluation.json").write_text(json.dumps(measured | {"checkpoint_sha256": "0"}))
    again = [*given[:2], "--output", str(tmp_path / "again"), "--evaluation", str(tmp_path / "evaluation.json")]
    assert export.main(again) == 3
    assert "evaluation.json must be of this checkpoint, got one of some/where" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_a_card_without_a_run_claims_nothing(trained: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "elsewhere" / "x"
    checkpoint.mkdir(parents=True)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # somebody else's
    for name in ("config.json", "model.safetensors"):
        (checkpoint / name).write_bytes((trained.checkpoint / name).read_bytes())
    given = ["--checkpoint", str(checkpoint), "--output", str(tmp_path / "out"), "--target", str(trained.target)]
    assert export.main(given) == 0
    assert "## " not in (tmp_path / "out" / "README.md").read_text()
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(checkpoint / "model.safetensors").keys()


def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "deep" / "down" / "x"
    checkpoint.mkdir(parents=True)
    output = tmp_path / "out"
    given = ["--checkpoint", str(checkpoint), "--output", str(output)]
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "loop").symlink_to("loop")
    other = tmp_path / "target"
    other.mkdir()
    told = json.loads((trained.target / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(told | {"num_hidden_layers": 5}))
    whole = ["--checkpoint", str(trained.checkpoint), "--output", str(output), "--target", str(trained.target)]
    for arguments, code, sentence in (
        ([*given, "--target", "t"], 1, "no checkpoint here"),
        ([*whole, "--output", str(tmp_path)], 3, "exists already"),
        ([*whole, "--target", "no/where/t"], 3, "target.path must be"),
        ([*whole, "--target", str(other)], 1, "layers, width and vocabulary must be (5, 32, 64), got (4, 32, 64)"),
        ([*whole, "--evaluation", str(tmp_path / "other.json")], 3, "must be a document of `python -m trainer.evaluate`"),
        ([*whole, "--output", "/proc/x/out"], 1, "cannot be written"),
        ([*whole, "--output", str(tmp_path / ("x" * 300))], 3, "cannot be used: [Errno 36] File name too long"),
        ([*whole, "--checkpoint", str(tmp_path / ("x" * 300))], 1, "no checkpoint here: [Errno 36] File name too long"),
        (
            [*whole, "--checkpoint", str(tmp_path / "loop")],
            1,
            "no checkpoint here: [Errno 40] Too many levels of symbolic links",
        ),
    ):
        assert export.main(arguments) == code
        err = capsys.readouterr().err
        assert sentence in err
        assert err.count("\n") == 1
    assert not output.exists()
    (checkpoint / "config.json").write_bytes((trained.checkpoint / "config.json").read_bytes())
    assert export.main(given) == 3
    assert "--target is required: " in capsys.readouterr().err


def test_asked_to_stop_it_leaves_nothing(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copying(_source: Path, copy: Path) -> None:
        copy.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(export.shutil, "copyfile", copying)
    assert call(trained, tmp_path / "out", "--target", str(trained.target)) == 130
    assert capsys.readouterr().err == "stopped, nothing was written\n"
    assert not list(tmp_path.iterdir())
