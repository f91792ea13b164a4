"""What a training run is told: eight sections, every value typed, ranged and explained.

The command line builds this same `TrainConfig` from YAML that the trainer builds from `config.json`, so a typo fails on the
laptop. Standard library only: it is imported where torch is not installed.
"""

import dataclasses
import difflib
import json
import math
import re
import types
import typing
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.errors import ConfigError

Graphs = Literal["none", "lazy", "mainwarm", "threadwarm"]
Dtype = Literal["float32", "bfloat16"]
LayerType = Literal["full_attention", "sliding_attention"]
Optimizer = Literal["adamw", "muon"]
LossWeights = Literal["decay", "dpace"]
LossLabels = Literal["tokens", "logits"]

DEFAULT_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""Loss decay by block size (SpecForge, paper); other sizes use 0.45 * block_size, which passes near all three."""


_LONGEST_TEXT = 1024
"""Characters; two of them, joined, still are a path."""
_LONGEST_NAME = 255
"""Bytes of a file's name, on Linux."""


def _bounds(
    low: float | None = None, high: float | None = None, *, open_low: bool = False, open_high: bool = False
) -> dict[str, Any]:
    return {"low": low, "high": high, "open_low": open_low, "open_high": open_high}


@dataclass(kw_only=True, slots=True)
class TargetConfig:
    """The frozen model that is to be served faster."""

    path: str
    """Folder of a Hugging Face checkpoint or of `gguf_file`, or a hub id. A relative folder lies under `run.root`."""
    gguf_file: str | None = None
    """Name of a GGUF file inside `path`."""
    dtype: Dtype = "bfloat16"
    """Type of weights and activations."""


@dataclass(kw_only=True, slots=True)
class DraftConfig:
    """The DFlash model that is trained. What is None is taken from the target."""

    num_layers: int = field(default=5, metadata=_bounds(1, 64))
    """Decoder layers."""
    block_size: int = field(default=16, metadata=_bounds(2, 64))
    """Positions a block has, the anchor included."""
    num_anchors: int = field(default=512, metadata=_bounds(1, 65536))
    """Blocks sampled from each packed row, however many documents share it."""
    target_layer_ids: list[int] | None = None
    """Tapped layers, 0-based: id k is the output of layer k. None: as many as `num_layers`, spread from 1 to L-3."""
    mask_token_id: int | None = field(default=None, metadata=_bounds(0))
    """Embedding row of slots 1..K-1. None: the first row without a token, else an unused control token."""
    intermediate_size: int | None = field(default=None, metadata=_bounds(1, 1 << 20))
    """Width of the MLP."""
    num_attention_heads: int | None = field(default=None, metadata=_bounds(1, 1024))
    """Query heads."""
    num_key_value_heads: int | None = field(default=None, metadata=_bounds(1, 1024))
    """Key and value heads."""
    head_dim: int | None = field(default=None, metadata=_bounds(2, 1024))
    """Width of a head."""
    layer_types: list[LayerType] | None = None
    """full_attention or sliding_attention for each layer; a sliding one is causal inside a block. None: all full."""
    sliding_window: int | None = field(default=None, metadata=_bounds(2))
    """Tokens that a sliding layer sees, the own included."""
    feature_noise: float = field(default=0.0, metadata=_bounds(0, 10))
    """Standard deviation of uniform noise that training adds to the context features."""
    dtype: Dtype = "bfloat16"
    """Type of weights and activations."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Token shards, written by `python -m trainer.prepare`."""

    path: str
    """Folder of the shards. A relative one lies under `run.root`."""


@dataclass(kw_only=True, slots=True)
class PrepareConfig:
    """How `python -m trainer.prepare CONFIG.json` makes `data.path` of chats. Training does not look at it."""

    input: list[str] = field(default_factory=list)
    """JSONL files, one conversation a line. A relative one lies under `run.root`."""
    held_out: float = field(default=0.02, metadata=_bounds(0, 1, open_high=True))
    """Share of the conversations that is set aside for validation and evaluation."""
    max_tokens: int | None = field(default=None, metadata=_bounds(1))
    """Longest document. None: `batch.row_tokens`."""
    regenerate: bool = False
    """Whether the target writes all answers anew. What follows says how, and needs it."""
    temperature: float = field(default=0.0, metadata=_bounds(0))
    """0 is greedy, else at least 0.001. Sampling has `run.seed`."""
    max_new_tokens: int = field(default=1024, metadata=_bounds(1))
    """Of an answer; a longer one is kept as far as that, and the last of its conversation."""
    rows: int = field(default=64, metadata=_bounds(1))
    """Answers in progress at once."""
    server: str | None = None
    """URL of an OpenAI-compatible server that runs the target, up to `/v1`. None: the target runs in the process itself."""
    server_model: str | None = None
    """What the server calls the target. None: `target.path`."""

    def check(self) -> None:
        """Whether there is something to prepare; raises ConfigError. A training run has no need of it."""
        if not self.input:
            raise ConfigError("prepare.input must name at least one JSONL file, got []")
        if self.server is not None and not is_url(self.server):
            raise ConfigError(f"prepare.server must be a URL such as http://host:8000/v1, got {_shown(self.server)}")
        for f in dataclasses.fields(self)[4:]:  # those after `regenerate`
            if not self.regenerate and getattr(self, f.name) != f.default:
                raise ConfigError(f"prepare.{f.name} needs prepare.regenerate: true, got {getattr(self, f.name)} without it")


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """The one static shape of every batch; `rows * row_tokens` is the token budget."""

    rows: int = field(default=16, metadata=_bounds(1, 4096))
    """Packed rows a batch."""
    row_tokens: int = field(default=3072, metadata=_bounds(8, 1 << 20))
    """Token slots a row, padding included. No document may be longer."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """The loss, and the optimizer with linear warm-up and cosine decay to zero (paper, by way of SpecForge's defaults)."""

    optimizer: Optimizer = "adamw"
    """muon: torch's own for matrices, its steps scaled to AdamW's size, and AdamW for norms."""
    lr: float = field(default=6e-4, metadata=_bounds(0, 1, open_low=True))
    """Peak learning rate."""
    weight_decay: float = field(default=0.0, metadata=_bounds(0, 1))
    """Decoupled weight decay of matrices; norms have none."""
    beta1: float = field(default=0.9, metadata=_bounds(0, 1, open_high=True))
    """AdamW's first-moment decay."""
    beta2: float = field(default=0.999, metadata=_bounds(0, 1, open_high=True))
    """AdamW's second-moment decay."""
    lr_warmup_steps: int | None = field(default=None, metadata=_bounds(0))
    """Steps of linear warm-up. None: 4 % of `run.steps`."""
    max_grad_norm: float = field(default=1.0, metadata=_bounds(0, open_low=True))
    """Global norm that gradients are clipped to."""
    loss_weights: LossWeights = "decay"
    """decay: by slot, as `loss_gamma` says. dpace: by how sure the drafter is of the slots before (D-PACE)."""
    loss_labels: LossLabels = "tokens"
    """tokens: the response's. logits: the target's own distribution there, for which the target is run to its end."""
    loss_gamma: float | None = field(default=None, metadata=_bounds(0, open_low=True))
    """Slot k weighs exp(-(k-1)/gamma) in the loss. None: 7, 5, 4 for blocks of 16, 10, 8."""


@dataclass(kw_only=True, slots=True)
class PipelineConfig:
    """Which thread runs where. Devices are logical: `cuda:0` is the first GPU that the run was given."""

    target_devices: list[str] = field(default_factory=lambda: ["cuda:0"])
    """One TargetForwardLoop for each entry; a device may be named twice."""
    drafter_devices: list[str] = field(default_factory=lambda: ["cuda:1"])
    """One DrafterTrainLoop for each entry; a device may be named twice."""
    channel_capacity: int = field(default=2, metadata=_bounds(1, 64))
    """Static buffers between a target and each of its drafters; with 2 one is filled while the other is trained on."""
    graphs: Graphs = "threadwarm"
    """How a drafter's step becomes a CUDA graph: none, lazy, mainwarm, threadwarm. On CPU only `none` exists."""
    allow_unsound: bool = False
    """Permit `lazy` and `mainwarm`, kept to show how they fail."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Length, seed and bookkeeping."""

    steps: int = field(default=1000, metadata=_bounds(1))
    """Optimizer steps."""
    seed: int = field(default=0, metadata=_bounds(0, (1 << 63) - 1))
    """Decides initial weights, order of documents and anchors."""
    log_every: int = field(default=10, metadata=_bounds(1))
    """Steps between two log lines. Their loss is that of all these steps, their accuracy and acceptance of the last one."""
    checkpoint_every: int = field(default=1000, metadata=_bounds(1))
    """Steps between two checkpoints; the last step always writes one."""
    keep_checkpoints: int | None = field(default=None, metadata=_bounds(1))
    """The newest so many stay; what a run is resumed from is kept of the newest alone. None: all stay."""
    resume: str | None = None
    """Checkpoint folder of an earlier run to go on from, with the same drafter, data, batches, optimizer, steps and seed."""
    validate_every: int | None = field(default=None, metadata=_bounds(1))
    """Steps between two looks at the held-out split; the last step always takes one. None: never."""
    validate_batches: int = field(default=8, metadata=_bounds(1))
    """Batches of a look, each time the same, so that looks compare."""
    root: str = "."
    """Folder that relative paths of `target` and `data` start from; set by `dflashctl launch` to the host's root."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """Everything a run is told. Checked on construction; errors name `section.key`."""

    target: TargetConfig
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        """Check ranges and what only several values together decide; raises ConfigError."""
        for section, part in _sections(self):
            for f in dataclasses.fields(part):
                _check_range(f"{section}.{f.name}", getattr(part, f.name), f.metadata)
        _check_together(self)

    @classmethod
    def from_dict(cls, data: object) -> "TrainConfig":
        """Build from nested plain values (YAML, JSON); raises ConfigError for unknown keys, wrong types, missing values."""
        known = {f.name: f.type for f in dataclasses.fields(cls)}
        given = _mapping("trainer", data)
        _refuse_unknown("trainer", given, known, "sections")
        return cls(**{name: _section(name, typing.cast(type, kind), given.get(name)) for name, kind in known.items()})

    @classmethod
    def from_json(cls, path: Path, text: str) -> "TrainConfig":
        """Build from the text of a config.json; raises ConfigError."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        except RecursionError:
            raise ConfigError(f"{path} is nested too deeply") from None
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values with every default spelled out."""
        return dataclasses.asdict(self)

    @property
    def token_budget(self) -> int:
        """Token slots of one batch, padding included."""
        return self.batch.rows * self.batch.row_tokens

    @property
    def lr_warmup_steps(self) -> int:
        """Steps of linear warm-up, the default resolved."""
        explicit = self.optim.lr_warmup_steps
        return explicit if explicit is not None else max(1, round(0.04 * self.run.steps))

    def logs_after(self, step: int) -> bool:
        """Whether there is a log line once `step` steps are done; only such a step measures accuracy and acceptance."""
        return step % self.run.log_every == 0 or step == self.run.steps

    def validates_after(self, step: int) -> bool:
        """Whether the held-out split is looked at once `step` steps are done."""
        every = self.run.validate_every
        return every is not None and (step % every == 0 or step == self.run.steps)

    @property
    def loss_gamma(self) -> float:
        """Decay of the loss weights, the default resolved; infinite where they do not decay by slot."""
        if self.optim.loss_weights != "decay":
            return math.inf
        size = self.draft.block_size
        return self.optim.loss_gamma or DEFAULT_GAMMA.get(size, 0.45 * size)

    @property
    def uses_cuda(self) -> bool:
        """Whether any stage runs on a GPU."""
        return any(d.startswith("cuda") for d in self.pipeline.target_devices + self.pipeline.drafter_devices)

    @property
    def prepare_device(self) -> str:
        """Where `prepare` runs the target: a GPU if the run has any and no server answers."""
        answers_here = self.prepare.regenerate and self.prepare.server is None
        return "cuda:0" if answers_here and self.uses_cuda else "cpu"

    @property
    def num_gpus(self) -> int:
        """GPUs the run needs: one more than its highest logical index."""
        devices = self.pipeline.target_devices + self.pipeline.drafter_devices
        return max((int(d.removeprefix("cuda:")) + 1 for d in devices if d.startswith("cuda")), default=0)


def keys() -> Iterator[str]:
    """Every `section.key` that a configuration may set."""
    for section in dataclasses.fields(TrainConfig):
        for f in dataclasses.fields(typing.cast(type, section.type)):
            yield f"{section.name}.{f.name}"


def is_url(text: str) -> bool:
    """Whether this can be the address of a server."""
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _sections(config: TrainConfig) -> Iterator[tuple[str, Any]]:
    for f in dataclasses.fields(config):
        yield f.name, getattr(config, f.name)


def _section(name: str, kind: type, data: object) -> Any:
    given = _mapping(name, {} if data is None else data)
    hints = typing.get_type_hints(kind)
    _refuse_unknown(name, given, hints, "keys")
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in given
    ]
    if missing:
        raise ConfigError(f"{name}.{missing[0]} is required, got nothing")
    return kind(**{key: _value(f"{name}.{key}", hints[key], value) for key, value in given.items()})


def _mapping(where: str, data: object) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {_shown(data)}")
    return data


def _refuse_unknown(where: str, given: Mapping[str, object], known: Mapping[str, object], what: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"{what} are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key '{key}'; {hint}")


def _value(where: str, hint: Any, value: object) -> object:
    """`value` as the annotated type; an int passes for a float that can hold it, nothing else is converted."""
    allowed = [hint] if not isinstance(hint, types.UnionType) else [a for a in hint.__args__ if a is not types.NoneType]
    optional = isinstance(hint, types.UnionType) and types.NoneType in hint.__args__
    if value is None and optional:
        return None
    kind = allowed[0]
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise ConfigError(f"{where} must be one of {', '.join(typing.get_args(kind))}, got {_shown(value)}")
        return value
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, got {_shown(value)}")
        return [_value(f"{where}[{i}]", typing.get_args(kind)[0], item) for i, item in enumerate(value)]
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1023:
        return float(value)
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise ConfigError(f"{where} must be {words[kind]}, got {_shown(value)}")
    if isinstance(value, str):
        _check_text(where, value)
    return value


def _check_text(where: str, text: str) -> None:
    """Most text becomes part of a path: refuse what no file system takes."""
    if len(text) > _LONGEST_TEXT:
        raise ConfigError(f"{where} must be at most {_LONGEST_TEXT} characters, got {len(text)}: {_shown(text)}")
    if re.search("[\0\ud800-\udfff]", text):
        raise ConfigError(f"{where} must be text of characters that a path can have, got {_shown(text)}")
    if any(len(name.encode()) > _LONGEST_NAME for name in text.split("/")):
        raise ConfigError(f"{where} must have names of at most {_LONGEST_NAME} bytes between its slashes, got {_shown(text)}")


def _check_range(where: str, value: object, bounds: Mapping[str, Any]) -> None:
    if not bounds or value is None:
        return
    low, high = bounds["low"], bounds["high"]
    number = typing.cast(float, value)
    below = low is not None and (number <= low if bounds["open_low"] else number < low)
    above = high is not None and (number >= high if bounds["open_high"] else number > high)
    if below or above or number != number:
        more, less = "more than " if bounds["open_low"] else "", f", {high} excluded" if bounds["open_high"] else ""
        text = f"{more}{low}..{high}{less}" if high is not None else f"{more or 'at least '}{low}"
        raise ConfigError(f"{where} must be {text}, got {value}")


def _check_together(config: TrainConfig) -> None:
    pipeline, draft = config.pipeline, config.draft
    for key in ("target_devices", "drafter_devices"):
        devices = getattr(pipeline, key)
        if not devices:
            raise ConfigError(f"pipeline.{key} must name at least one device, got []")
        for device in devices:
            index = device.removeprefix("cuda:")
            if device != "cpu" and not (device.startswith("cuda:") and index.isascii() and index.isdigit()):
                raise ConfigError(f"pipeline.{key} must hold 'cpu' or 'cuda:N', got {_shown(device)}")
    kinds = {d.split(":")[0] for d in pipeline.target_devices + pipeline.drafter_devices}
    if len(kinds) > 1:
        raise ConfigError("pipeline: target_devices and drafter_devices must all be cpu or all be cuda, got both")
    if kinds == {"cpu"} and pipeline.graphs != "none":
        raise ConfigError(f"pipeline.graphs must be none on cpu, got {pipeline.graphs}")
    if pipeline.graphs in ("lazy", "mainwarm") and not pipeline.allow_unsound:
        reason = {"lazy": "crashes in cudagraph-trees", "mainwarm": "aborts or is silently wrong"}[pipeline.graphs]
        raise ConfigError(
            f"pipeline.graphs: {pipeline.graphs} {reason} when drafters share a process; "
            "use threadwarm, or set pipeline.allow_unsound: true to see it"
        )
    warmup, steps = config.optim.lr_warmup_steps, config.run.steps
    if warmup is not None and warmup >= steps:
        raise ConfigError(f"optim.lr_warmup_steps must be below run.steps ({steps}), got {warmup}")
    kinds_of_layers = draft.layer_types or []
    if kinds_of_layers and len(kinds_of_layers) != draft.num_layers:
        raise ConfigError(
            f"draft.layer_types must name {draft.num_layers} layers, as draft.num_layers says, got {kinds_of_layers}"
        )
    slides = "sliding_attention" in kinds_of_layers
    if slides and (draft.sliding_window is None or draft.sliding_window < draft.block_size):
        raise ConfigError(
            f"draft.sliding_window must be at least draft.block_size ({draft.block_size}) for sliding layers, "
            f"got {draft.sliding_window}"
        )
    if draft.sliding_window is not None and not slides:
        raise ConfigError("draft.sliding_window needs a sliding_attention layer in draft.layer_types, got none")
    optim = config.optim
    if optim.loss_weights == "dpace" and (optim.loss_labels == "logits" or optim.loss_gamma is not None):
        other = "optim.loss_gamma" if optim.loss_gamma is not None else "optim.loss_labels: logits"
        raise ConfigError(f"optim.loss_weights: dpace cannot be had with {other}; leave out one of them")
    ids = draft.target_layer_ids
    if ids is not None and (not ids or sorted(set(ids)) != ids or ids[0] < 0):
        raise ConfigError(f"draft.target_layer_ids must be ascending layer indices from 0, got {ids}")
    longest = config.prepare.max_tokens
    if longest is not None and longest > config.batch.row_tokens:
        raise ConfigError(f"prepare.max_tokens must be at most batch.row_tokens ({config.batch.row_tokens}), got {longest}")
    if draft.block_size >= config.batch.row_tokens:
        raise ConfigError(
            f"draft.block_size must be below batch.row_tokens ({config.batch.row_tokens}), got {draft.block_size}"
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
