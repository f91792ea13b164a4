"""A checkpoint for others: `python -m trainer.export --checkpoint RUN/checkpoints/latest --output DIR`.

`--format flat` is z-lab's layout, which a checkpoint already has; `--format speculators` is that of vllm-project/speculators.
Both get a model card, README.md: what the drafter was trained on, how, and what was measured. The card takes what it says from
the run's config.json and its events up to the checkpoint's step, from the shards' meta.json and from evaluations of this very
checkpoint that are named; what is not there it leaves out. Where it lies in the events of a start that it was saved then, those
tell both; else, of checkpoints in checkpoints.1 or the next number, events.1.jsonl does. The output folder appears whole or not
at all.

Sources: the keys are those that vllm-project/speculators 0.9 writes and reads.
"""

import argparse
import contextlib
import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainer.checkpoint import appearing_folder, checkpoint_digest, load_checkpoint, read_config, resolved, step_of
from trainer.config import TargetConfig, TrainConfig
from trainer.dataset import FORMAT
from trainer.errors import CheckpointError, ConfigError, TrainerError
from trainer.events import CHECKPOINT, STARTED, STEP, VALIDATION, parse_line, utc
from trainer.model.target import described_target, load_config

Format = Literal["flat", "speculators"]
_NOT_THE_DECODERS = ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers")
"""Keys of the flat layout that do not describe the decoder itself."""
_EARLIER = re.compile(r"checkpoints\.(\d+)")
"""Where `trainer.__main__` keeps the checkpoints of an earlier start."""


def export(
    checkpoint: Path, output: Path, kind: Format, *, target: TargetConfig | None = None, evaluations: Sequence[Path] = ()
) -> None:
    """Write `checkpoint` to `output`, which must not exist; `target` defaults to the run's. Raises TrainerError."""
    try:
        exists = output.exists()
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise ConfigError(f"--output {output} cannot be used: {error}") from None
    if exists:
        raise ConfigError(f"{output} exists already; remove it or choose another --output")
    checkpoint = resolved(checkpoint)
    run = _read_run(checkpoint)
    config = read_config(checkpoint)
    target, root = (target, Path()) if target else _target_of(run, checkpoint)
    found = load_config(target, root)
    load_checkpoint(checkpoint, described_target(found), torch.float32)  # what cannot be loaded is of no use to others
    digest = checkpoint_digest(checkpoint)
    measured = [_read_evaluation(path, digest) for path in evaluations]
    if kind == "speculators":
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[found.model_type]
        written = speculators_config(config, target.path, architecture)
    else:
        written = config
    told = _measured(checkpoint) if run else []
    card = model_card(kind, config, _public(target.path), run, _read_meta(run), told, measured)
    with _sentences(output), appearing_folder(output) as folder:
        shutil.copyfile(checkpoint / "model.safetensors", folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card, encoding="utf-8")


def speculators_config(flat: dict[str, Any], verifier: str, verifier_architecture: str) -> dict[str, Any]:
    """config.json of the speculators format for a checkpoint in the flat one.

    Its layer ids count the embedding as 0. Tensors have the same names; embedding and head are the verifier's.
    """
    inner = flat["dflash_config"]
    proposal = {"proposal_type": "greedy", "speculative_tokens": flat["block_size"] - 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "block_size": flat["block_size"],
        "draft_vocab_size": flat["vocab_size"],
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [k + 1 for k in inner["target_layer_ids"]],
        "sample_from_anchor": False,
        # some readers take its opposite for the causality of every layer, those with full attention included
        "sliding_window_non_causal": "sliding_attention" not in flat["layer_types"],
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": flat["dtype"],
        "transformer_layer_config": {key: value for key, value in flat.items() if key not in _NOT_THE_DECODERS},
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1}],
            "verifier": {"name_or_path": verifier, "architectures": [verifier_architecture]},
        },
    }


def model_card(
    kind: Format,
    config: dict[str, Any],
    target: str,
    run: TrainConfig | None,
    data: dict[str, Any] | None,
    told: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]],
) -> str:
    """README.md: what it is, data, recipe, numbers; a section without facts is left out."""
    name = "speculators" if kind == "speculators" else "z-lab's flat"
    lines = ["---", f"base_model: {json.dumps(target)}", "tags: [dflash, speculative-decoding, draft-model]", "---", ""]
    lines += [
        f"# DFlash drafter for {target}",
        "",
        f"A block-diffusion draft model ([DFlash](https://arxiv.org/abs/2602.06036)) in {name} format: "
        f"{config['num_hidden_layers']} layers, blocks of {config['block_size']} ({config['block_size'] - 1} draft tokens), "
        f"reading layers {', '.join(map(str, config['dflash_config']['target_layer_ids']))} of the target's "
        f"{config['num_target_layers']}. Embedding and output head are the target's and are not included.",
    ]
    sections = [("Data", _data_lines(data)), ("Recipe", _recipe_lines(run)), ("Numbers", _number_lines(told, evaluations))]
    for title, body in sections:
        lines += ["", f"## {title}", "", *body] if body else []
    return "\n".join(lines) + "\n"


def _data_lines(data: dict[str, Any] | None) -> list[str]:
    if data is None:
        return []
    lines = [
        f"- {split.replace('_', ' ')}: {counts['documents']} conversations, {counts['tokens']} tokens, "
        f"{counts['response_tokens']} of them responses"
        for split, counts in data["splits"].items()
    ]
    return [*lines, f"- dropped: {sum(data.get('dropped', {}).values())}; at most {data.get('max_tokens')} tokens each"]


def _recipe_lines(run: TrainConfig | None) -> list[str]:
    """Without the folders of the machine that it ran on."""
    if run is None:
        return []
    told = {key: value for key, value in run.to_dict().items() if key in ("draft", "batch", "optim", "run")}
    told["run"] = {key: value for key, value in told["run"].items() if key not in ("root", "resume")}
    return ["```json", json.dumps(told, indent=2), "```"]


def _number_lines(told: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for event in (STEP, VALIDATION):
        last = next((e for e in reversed(told) if e["event"] == event), None)
        if last is not None:
            where = "training batches" if event == STEP else "held-out split"
            lines.append(
                f"- {where}, step {last['step']}: loss {last['loss']:.3f}, "
                f"estimated acceptance length {last['acceptance_length']:.2f}"
            )
    lines += [_evaluation_line(document) for document in evaluations]
    return lines


def _evaluation_line(document: dict[str, Any]) -> str:
    accepted = document["acceptance_length"]
    interval = accepted["interval_95"]
    within = f" (95 % {interval[0]:.2f}..{interval[1]:.2f})" if interval else ""
    speedup = f", {document['speedup']:.2f} times plain decoding's tokens/s" if document["speedup"] else ""
    mean = f"{accepted['mean']:.2f}" if accepted["mean"] is not None else "unknown"
    return (
        f"- {Path(document['prompts']['source']).name}, {document['prompts']['count']} prompts, temperature "
        f"{document['temperature']:g}: acceptance length {mean}{within} over {accepted['verifications']} verifications{speedup}"
    )


def _public(target: str) -> str:
    """A hub id or a folder's name: where a machine keeps its models is nobody's business."""
    return Path(target).name if Path(target).is_absolute() else target


def _target_of(run: TrainConfig | None, checkpoint: Path) -> tuple[TargetConfig, Path]:
    if run is None:
        raise ConfigError(f"--target is required: {checkpoint} does not lie in the folder of a run that would name it")
    return run.target, Path(run.run.root)


def _read_run(checkpoint: Path) -> TrainConfig | None:
    """The run's configuration; None where the folder around is no run's. config.json is the newest start's."""
    told = _own_events(checkpoint)
    if told is None and _EARLIER.fullmatch(checkpoint.parent.name):
        told = _read_events(checkpoint)
    if told is None:
        found = _read_json(checkpoint.parent.parent / "config.json")
    else:
        found = next((event.get("config") for event in told if event["event"] == STARTED), None)
    try:
        return TrainConfig.from_dict(found)
    except ConfigError:
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file that need not be there."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read_meta(run: TrainConfig | None) -> dict[str, Any] | None:
    """What the shards say of themselves; None for a file that is none of ours."""
    meta = _read_json(Path(run.run.root) / run.data.path / "meta.json") if run else None
    if meta is None or meta.get("format") != FORMAT:
        return None
    try:
        _data_lines(meta)
    except (LookupError, TypeError, AttributeError):
        return None
    return meta


def _read_events(checkpoint: Path) -> list[dict[str, Any]]:
    """What the start that wrote this checkpoint has told: by its own events, else by the number of its folder."""
    earlier = _EARLIER.fullmatch(checkpoint.parent.name)
    numbered = checkpoint.parent.parent / (f"events.{earlier[1]}.jsonl" if earlier else "events.jsonl")
    return _own_events(checkpoint) or _parse_events(numbered)


def _own_events(checkpoint: Path) -> list[dict[str, Any]] | None:
    """Those of the start that told of this checkpoint right after it was written; None if there are none.

    Their number may be another than that of the checkpoint's folder: a start that a typo ends sets the events aside alone.
    Starts of one folder follow each other, so that the time of the file belongs to one of them, or to none if it was copied.
    """
    try:
        saved = utc((checkpoint / "model.safetensors").stat().st_mtime)
        told = map(_parse_events, checkpoint.parent.parent.glob("events*.jsonl"))
    except OSError:
        return None
    return next((events for events in told if _wrote(events, step_of(checkpoint), saved)), None)


def _wrote(told: list[dict[str, Any]], step: int | None, saved: str) -> bool:
    begin = next((event.get("time") for event in told if event["event"] == STARTED), None)
    end = next((event.get("time") for event in told if event["event"] == CHECKPOINT and event.get("step") == step), None)
    return isinstance(begin, str) and isinstance(end, str) and begin <= saved <= end


def _parse_events(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [event for event in map(parse_line, lines) if event is not None]


def _measured(checkpoint: Path) -> list[dict[str, Any]]:
    """The events up to the checkpoint's step that have numbers for the card; none if its name does not tell the step."""
    last = step_of(checkpoint)
    if last is None:
        return []
    return [
        event
        for event in _read_events(checkpoint)
        if event["event"] in (STEP, VALIDATION)
        and all(isinstance(event.get(key), int | float) for key in ("step", "loss", "acceptance_length"))
        and event["step"] <= last
    ]


def _read_evaluation(path: Path, digest: str) -> dict[str, Any]:
    document = _read_json(path)
    if document is None or "acceptance_length" not in document:
        raise ConfigError(f"--evaluation {path} must be a document of `python -m trainer.evaluate`")
    if document.get("checkpoint_sha256") != digest:
        raise ConfigError(f"--evaluation {path} must be of this checkpoint, got one of {document.get('checkpoint')}")
    try:
        _evaluation_line(document)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"--evaluation {path} must be a whole document of `python -m trainer.evaluate`: {error!r}") from None
    return document


@contextlib.contextmanager
def _sentences(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description="A checkpoint with its card, for others.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--format", choices=["flat", "speculators"], default="flat", help="layout (%(default)s)")
    parser.add_argument("--target", help="folder or hub id of the target model; that of the checkpoint's run if not given")
    parser.add_argument("--gguf-file", help="name of a GGUF file inside the target's folder")
    parser.add_argument("--evaluation", type=Path, action="append", default=[], help="evaluation.json for the card; repeatable")
    args = parser.parse_args(argv)
    target = TargetConfig(path=args.target, gguf_file=args.gguf_file) if args.target else None
    try:
        export(args.checkpoint, args.output, args.format, target=target, evaluations=args.evaluation)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stopped, nothing was written\n")
        return 130
    sys.stdout.write(f"wrote {args.output}\n")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # an exit cleans up, a death does not
    sys.exit(main())
