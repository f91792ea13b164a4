"""Checkpoints of the drafter in z-lab's flat layout, written so that a reader never sees half of one.

`checkpoints/step-<n>/` holds config.json and model.safetensors; `checkpoints/latest` is a symbolic link to the newest. The
newest of an unfinished run holds `training/` too, from which it is resumed: fp32 parameters, statistics of the optimizer, the
step. A folder appears under its name by one rename, after everything in it has reached the disk. Written by one drafter thread
(all drafters are equal). Embedding and head are the target's and are not in it.

Sources: the layout is z-lab's; the keys are what its class, transformers, SGLang and vLLM read, old spellings included.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import reprlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config import TrainConfig
from trainer.errors import CheckpointError
from trainer.model.draft import DraftModel, DraftSpec, TargetInfo, layer_windows
from trainer.packing import ORDER

log = logging.getLogger("trainer")
_TRAINING = "training"
"""Folder inside a checkpoint."""
_STEP = re.compile(r"step-(\d+)")
"""Names of checkpoints; other names in their folder are somebody else's."""


class Staging:
    """Memory that checkpoints pass through, allocated once: nothing is allocated on a GPU while a run is on."""

    def __init__(self, model: DraftModel) -> None:
        """Host memory for the whole model in bf16, on a GPU page-locked, and device memory for its largest tensor."""
        self._model = model
        self.spec = model.spec
        parameters = dict(model.named_parameters())
        device = model.norm.weight.device
        self._cast = torch.empty(max(p.numel() for p in parameters.values()), dtype=torch.bfloat16, device=device)
        self._host = {
            name: torch.empty(p.shape, dtype=torch.bfloat16, pin_memory=device.type == "cuda") for name, p in parameters.items()
        }

    @torch.no_grad()
    def fetch(self) -> dict[str, Tensor]:
        """The parameters as they are now; valid until the next call. Waits for the current stream."""
        for name, parameter in self._model.named_parameters():
            cast = self._cast[: parameter.numel()].view(parameter.shape)
            self._host[name].copy_(cast.copy_(parameter), non_blocking=True)
        if self._cast.is_cuda:
            torch.cuda.current_stream().synchronize()
        return self._host


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """What a run goes on from, bit for bit. Order of data and anchors follow from the step and the seed."""

    step: int
    """Steps done."""
    tensors: Mapping[str, Tensor]
    """`DraftOptimizer.state_tensors`."""
    trained_with: Mapping[str, Any]
    """`trained_with` and `trained_for` of its run."""


def trained_with(config: TrainConfig, data_checksum: str) -> dict[str, Any]:
    """The values that a resumed run has to share with the run it resumes, as far as they are known before the target is."""
    shared = {f"target.{key}": value for key, value in asdict(config.target).items()}
    shared |= {f"draft.{key}": value for key, value in asdict(config.draft).items()}
    shared |= {f"batch.{key}": value for key, value in asdict(config.batch).items()}
    shared |= {f"optim.{key}": value for key, value in asdict(config.optim).items()}
    shared |= {"run.steps": config.run.steps, "run.seed": config.run.seed}
    shared |= {"number of drafters": len(config.pipeline.drafter_devices), "checksum of data.path": data_checksum}
    return shared | {"the order of batches": ORDER}


def trained_for(spec: DraftSpec, info: TargetInfo) -> dict[str, Any]:
    """Those that the target decides: another one may lie under the old name."""
    shared = {f"the drafter's {key}": value for key, value in asdict(spec).items()} | {"the drafter's dtype": str(spec.dtype)}
    return shared | {"the target's num_layers": info.num_layers, "the target's vocab_size": info.vocab_size}


def save_checkpoint(
    folder: Path,
    step: int,
    staging: Staging,
    info: TargetInfo,
    state: TrainingState | None = None,
    keep: int | None = None,
) -> Path:
    """Write `folder/step-<step>`, point `folder/latest` at it and remove what is older than the newest `keep`; returns it.

    Raises CheckpointError; a failed write leaves nothing new behind. What cannot be removed is told and stays. `state` goes
    into a folder of its own, because servers read every file of tensors beside config.json, and older checkpoints lose theirs:
    it is six times their size.
    """
    final = folder / f"step-{step}"
    try:
        _sweep(folder)
        with appearing_folder(final) as partial:
            _write_files(partial, staging.fetch(), staging.spec, info)
            if state is not None:
                (partial / _TRAINING).mkdir()
                _write_state(partial / _TRAINING, state)
        _point_latest(folder, final.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{final}: the checkpoint could not be written: {error}") from error
    _remove_older(folder, step, keep)
    return final


@contextlib.contextmanager
def appearing_folder(final: Path) -> Iterator[Path]:
    """A new folder beside `final` that takes its name once all in it is on the disk, and is removed if anything fails.

    Raises OSError, also if `final` is there already and not empty.
    """
    partial = final.parent / f".{final.name}.partial"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        partial.rename(final)
        _flush(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_checkpoint(folder: Path, info: TargetInfo, dtype: torch.dtype) -> DraftModel:
    """The drafter in `folder`, in host memory, to be computed in `dtype`.

    Raises CheckpointError for a folder without a whole checkpoint, for numbers that are not finite and for a drafter that was
    not made for this target.
    """
    config = read_config(folder)
    try:
        tensors = load_file(folder / "model.safetensors")
    except OSError as error:
        raise CheckpointError(f"{folder}: no checkpoint here: {error}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: the checkpoint cannot be read: {error}") from None
    spec = _read_spec(config, dtype)
    check_made_for(folder, config, (info.num_layers, info.hidden_size, info.vocab_size))
    with torch.device("meta"):  # no memory for what config.json says alone
        model = DraftModel(spec)
    for name, parameter in model.named_parameters():
        found = list(tensors[name].shape) if name in tensors else "nothing"
        if found != list(parameter.shape):
            raise CheckpointError(f"{folder / 'model.safetensors'}: {name} must be {list(parameter.shape)}, got {found}")
        kind = str(tensors[name].dtype).removeprefix("torch.")
        if kind not in _FLOATS:
            raise CheckpointError(f"{folder / 'model.safetensors'}: {name} must be one of {', '.join(_FLOATS)}, got {kind}")
        if not tensors[name].float().isfinite().all():
            raise CheckpointError(f"{folder / 'model.safetensors'}: {name} must hold finite numbers alone, got others")
    unknown = tensors.keys() - dict(model.named_parameters()).keys()
    if unknown:
        raise CheckpointError(f"{folder / 'model.safetensors'}: holds tensors that no drafter has, such as {min(unknown)}")
    model.to_empty(device="cpu").load_state_dict(tensors)
    return model


def check_made_for(folder: Path, config: Mapping[str, Any], is_for: tuple[int, int, int]) -> None:
    """Refuse, with CheckpointError, a drafter for a target of other layers, width and vocabulary."""
    made_for = (config["num_target_layers"], config["hidden_size"], config["vocab_size"])
    if made_for != is_for:
        raise CheckpointError(
            f"{folder}: made for another target: layers, width and vocabulary must be {is_for}, got {made_for}"
        )


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 of the drafter's tensors, which tells a checkpoint from others; raises CheckpointError."""
    try:
        return _sha256(folder / "model.safetensors")
    except OSError as error:
        raise CheckpointError(f"{folder}: no checkpoint here: {error}") from None


def resolved(folder: Path) -> Path:
    """Where a checkpoint lies, for `latest` may point elsewhere soon; links in a loop are left for whoever reads it."""
    return Path(os.path.realpath(folder))


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's name tells."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def load_training_state(folder: Path, expected: Mapping[str, Any]) -> TrainingState:
    """What `save_checkpoint` kept in `folder`, in host memory; raises CheckpointError, also if not trained as `expected`."""
    path = folder / _TRAINING
    try:
        told = json.loads((path / "state.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "state.safetensors")
        digest = _sha256(path / "state.safetensors")
        step, before = told["step"], dict(told["trained_with"])
        kept = told.get("sha256", digest)  # states of before have none
    except OSError as error:
        raise CheckpointError(
            f"run.resume {folder}: nothing to resume from, only the newest checkpoint of an unfinished run has it: {error}"
        ) from None
    except (ValueError, SafetensorError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"run.resume {folder}: the training state cannot be read: {error}") from None
    if kept != digest:
        raise CheckpointError(
            f"run.resume {folder}: the training state is damaged: the SHA-256 of state.safetensors must be {kept}, got {digest}"
        )
    state = TrainingState(step=step, tensors=tensors, trained_with=before)
    check_trained_as(folder, state, expected)
    _check_step(folder, state, expected.get("run.steps"))
    return state


def _check_step(folder: Path, state: TrainingState, steps: int | None) -> None:
    """What is not done yet, and what the folder's name tells, wherever `latest` points."""
    named = step_of(folder.resolve())
    allowed = f"{named}, as its folder says" if named is not None else f"1..{steps - 1}" if steps else "at least 1"
    step = state.step
    possible = type(step) is int and step >= 1 and (steps is None or step < steps)
    if not possible or (named is not None and step != named):
        raise CheckpointError(f"run.resume {folder}: step in state.json must be {allowed}, got {step!r}")


def check_trained_as(folder: Path, state: TrainingState, expected: Mapping[str, Any]) -> None:
    """Refuse, with CheckpointError, a state from `folder` that was trained otherwise."""
    for key, value in json.loads(json.dumps(expected)).items():
        before = state.trained_with.get(key)
        if before != value:
            raise CheckpointError(f"run.resume {folder}: {key} must be what it was, {before!r}, got {value!r}")


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json: every key that a drafter is built from is there and in range. Raises CheckpointError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{folder}: no checkpoint here: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    inner = config.get("dflash_config") if isinstance(config, dict) else None
    for key, place in [*((key, config) for key in _KEYS), *((key, inner) for key in _DFLASH_KEYS)]:
        if not isinstance(place, dict) or key not in place:
            raise CheckpointError(f"{path} must be a DFlash drafter's: '{key}' is missing")
    for key, value, is_right, allowed in _checks(config):
        if not is_right:
            raise CheckpointError(f"{path}: {key} must be {allowed}, got {reprlib.repr(value)}")
    return config


def _checks(config: dict[str, Any]) -> Iterator[tuple[str, Any, bool, str]]:
    """Key, value, whether it is right, what is; each rests on those before it, so that none may be drawn after one is wrong."""
    for key, (least, most) in _RANGES.items():
        yield key, config[key], _is_whole(config[key], least, most), f"a whole number in {least}..{most}"
    for key in ("rms_norm_eps", "initializer_range", "rope_theta"):
        value = config[key]
        positive = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST
        yield key, value, positive, f"a number above 0, at most {_LARGEST:g}"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield "num_attention_heads", heads, heads % kv_heads == 0, f"a multiple of the {kv_heads} key and value heads"
    yield "head_dim", config["head_dim"], config["head_dim"] % 2 == 0, "even for rotary positions"
    mask, vocab_size = config["dflash_config"]["mask_token_id"], config["vocab_size"]
    yield "mask_token_id", mask, _is_whole(mask) and mask < vocab_size, f"a token id in 0..{vocab_size - 1}"
    ids, last = config["dflash_config"]["target_layer_ids"], config["num_target_layers"] - 2
    layers = isinstance(ids, list) and bool(ids) and all(map(_is_whole, ids))
    yield "target_layer_ids", ids, layers and ids == sorted(set(ids)) and ids[-1] <= last, f"ascending layers in 0..{last}"
    kinds, num_layers, window = config["layer_types"], config["num_hidden_layers"], config["sliding_window"]
    known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    named = f"full_attention or sliding_attention for each of the {num_layers} layers"
    yield "layer_types", kinds, known and len(kinds) == num_layers, named
    slides = "sliding_attention" in kinds
    wide = _is_whole(window, 2, _MOST_TOKENS)
    yield "sliding_window", window, wide or (window is None and not slides), f"a whole number in 2..{_MOST_TOKENS}"
    yield "dtype", config["dtype"], isinstance(config["dtype"], str), "the name of a type"


def _is_whole(value: object, least: int = 0, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def _read_spec(config: dict[str, Any], dtype: torch.dtype) -> DraftSpec:
    inner = config["dflash_config"]
    return DraftSpec(
        num_layers=config["num_hidden_layers"],
        block_size=config["block_size"],
        target_layer_ids=tuple(inner["target_layer_ids"]),
        mask_token_id=inner["mask_token_id"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
        initializer_range=config["initializer_range"],
        layer_windows=layer_windows(config["layer_types"], config["sliding_window"]),
        dtype=dtype,
    )


_FLOATS = ("float64", "float32", "float16", "bfloat16")
_LARGEST = 1e30
"""Far more than any, and far within fp32."""
_MOST_TOKENS = (1 << 63) - 1
"""What positions are compared with."""
_RANGES = {
    "block_size": (2, 64),
    "num_target_layers": (2, 1 << 20),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 20),
    "num_hidden_layers": (1, 64),
    "num_attention_heads": (1, 1024),
    "num_key_value_heads": (1, 1024),
    "head_dim": (2, 1024),
    "vocab_size": (1, 1 << 31),
}
"""As of a configuration's section `draft`; what the target has is compared with it later."""
_DFLASH_KEYS = ("mask_token_id", "target_layer_ids")
_KEYS = (
    "block_size",
    "num_target_layers",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "initializer_range",
    "layer_types",
    "sliding_window",
    "rope_theta",
    "dtype",
)


def checkpoint_config(spec: DraftSpec, info: TargetInfo) -> dict[str, Any]:
    """config.json as plain values."""
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "num_target_layers": info.num_layers,
        "dflash_config": {
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
        },
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "vocab_size": info.vocab_size,
        "max_position_embeddings": info.max_position_embeddings,
        "initializer_range": spec.initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in spec.layer_windows],
        "use_sliding_window": any(spec.layer_windows),
        "sliding_window": next(filter(None, spec.layer_windows), None),
        "max_window_layers": spec.num_layers,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": info.bos_token_id,
        "eos_token_id": info.eos_token_id,
        "pad_token_id": info.pad_token_id,
    }


def _write_files(folder: Path, tensors: dict[str, Tensor], spec: DraftSpec, info: TargetInfo) -> None:
    config = json.dumps(checkpoint_config(spec, info), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_state(folder: Path, state: TrainingState) -> None:
    tensors = {name: tensor.cpu().contiguous() for name, tensor in state.tensors.items()}
    save_file(tensors, folder / "state.safetensors")
    told = {"step": state.step, "sha256": _sha256(folder / "state.safetensors"), "trained_with": state.trained_with}
    (folder / "state.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_older(folder: Path, newest: int, keep: int | None) -> None:
    """No failure here ends a run: the new checkpoint is good whatever becomes of the old ones."""
    found = [(step, path) for path in folder.iterdir() if path.is_dir() and (step := step_of(path)) is not None]
    older = [path for step, path in sorted(found) if step < newest]
    num_kept = len(older) if keep is None else keep - 1
    for i, path in enumerate(older):
        _remove(folder, path if i < len(older) - num_kept else path / _TRAINING)


def _remove(folder: Path, path: Path) -> None:
    """Hide it first, so that a death in between leaves no half of it under its name; `_sweep` finds it again."""
    hidden = folder / f".{'-'.join(path.relative_to(folder).parts)}.removed"
    try:
        path.rename(hidden)
        shutil.rmtree(hidden)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)


def _sweep(folder: Path) -> None:
    """Remove what a death has left half written or half removed, as far as that goes."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _point_latest(folder: Path, name: str) -> None:
    link = folder / ".latest.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(folder / "latest")
    _flush(folder)


def _flush(path: Path) -> None:
    """Make a file or a folder's entries reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
