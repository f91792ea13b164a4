"""The frozen target model, run only as far as the drafter reads it.

Hugging Face loads the weights and its decoder layers do the work; the loop over them is ours. It stops after the last
tapped layer and keeps each tapped layer's own output (`hidden_states[k + 1]` of the Hugging Face model), never the
final norm's; later layers are dropped after loading. Only for a drafter that learns from the target's logits it runs
to its end and gives what its head reads. The head itself is not run here; an untied one stays in host memory for drafters
to copy.

Loading patches torch globally inside transformers, so one lock serialises it; afterwards nothing changes any more, and
the TargetForwardLoops of one device share one TargetModel. Shape legend: `trainer.batch`.
"""

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from trainer.batch import Batch
from trainer.config import DraftConfig, TargetConfig
from trainer.errors import ConfigError, TargetError
from trainer.model.attention import AttentionMask, attend, document_mask
from trainer.model.draft import TargetInfo, resolve_target_layer_ids

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders whose layers take the same call and need nothing before them but the embedding."""

MOVING_ROPE_TYPES = ("dynamic", "longrope")
"""Rotary positions that depend on the longest document seen, so a packed document would not be what it is alone."""

_ATTENTION = "packed_documents"
_LOADING = threading.Lock()


class TargetModel:
    """Embedding and decoder layers up to the last tapped one, frozen on one device."""

    info: TargetInfo
    target_layer_ids: tuple[int, ...]
    embedding: Tensor
    """[V, D] on the model's device."""
    head: Tensor
    """[V, D]: the embedding itself where the two are tied, else in host memory."""

    def __init__(self, model: Any, target_layer_ids: tuple[int, ...], device: torch.device, *, to_end: bool = False) -> None:
        """Take what is needed out of a Hugging Face causal LM, whose attention is replaced; all of it if it runs `to_end`."""
        decoder, config = model.model, model.config
        config._attn_implementation = _ATTENTION
        self.target_layer_ids = target_layer_ids
        num_layers = len(decoder.layers) if to_end else target_layer_ids[-1] + 1
        self._layers = nn.ModuleList(decoder.layers[:num_layers]).requires_grad_(False).eval().to(device)
        self._norm = decoder.norm.requires_grad_(False).to(device) if to_end else None
        self._rotary = decoder.rotary_emb.to(device)
        self._windows = {None, getattr(config, "sliding_window", None)}
        tied = model.lm_head.weight is decoder.embed_tokens.weight
        self.embedding = decoder.embed_tokens.weight.detach().to(device)
        self.head = self.embedding if tied else model.lm_head.weight.detach()
        self.info = _info(config, len(decoder.layers), len(self.embedding))

    @property
    def context_width(self) -> int:
        """L*D: the width of the context features."""
        return len(self.target_layer_ids) * self.embedding.shape[1]

    @torch.no_grad()
    def context_features(
        self, batch: Batch, out: Tensor | None = None, states: Tensor | None = None, *, eager: bool = False
    ) -> Tensor:
        """[B, S, L*D], written into `out`: each document reads itself alone. `batch` lies on the model's device.

        What the head reads, [B, S, D], is written into `states` by a target that runs to its end. On CUDA layers are compiled,
        unless they are to be `eager`.
        """
        masks = {window: document_mask(batch.doc_ids, window) for window in self._windows}
        hidden_BSD = F.embedding(batch.tokens, self.embedding)
        rotary = self._rotary(hidden_BSD, batch.positions)
        if out is None:
            out = hidden_BSD.new_empty(*batch.tokens.shape, self.context_width)
        places = dict(zip(self.target_layer_ids, out.chunk(len(self.target_layer_ids), dim=-1), strict=True))
        run_layer = _compiled_layer() if hidden_BSD.is_cuda and not eager else _run_layer
        for k, layer in enumerate(self._layers):
            hidden_BSD = run_layer(layer, hidden_BSD, masks, batch.positions, rotary)
            if k in places:
                places[k].copy_(hidden_BSD)
        if states is not None:
            assert self._norm is not None
            states.copy_(self._norm(hidden_BSD))
        return out

    def ends(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(embedding, head), [V, D] each, where and as a drafter reads them; one tensor if tied, no copy if in place."""
        embedding = self.embedding.to(device, dtype)
        return embedding, embedding if self.head is self.embedding else self.head.to(device, dtype)


def _run_layer(
    layer: nn.Module,
    hidden_BSD: Tensor,
    masks: dict[int | None, AttentionMask],
    positions_BS: Tensor,
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    output: Tensor = layer(hidden_BSD, attention_mask=masks, position_ids=positions_BS, position_embeddings=rotary)
    return output


@functools.cache
def _compiled_layer() -> Callable[..., Tensor]:
    """One compilation serves all layers: they differ in weights alone."""
    return torch.compile(_run_layer, dynamic=False, fullgraph=True)


def load_target(
    config: TargetConfig, root: Path, device: torch.device, draft: DraftConfig, *, to_end: bool = False
) -> TargetModel:
    """Load the target for a drafter of this configuration; whole if it is to run `to_end`.

    Raises TargetError for a model that is missing, broken or of another kind, ConfigError for layers that it lacks.
    """
    source = resolve_source(config, root)
    with _LOADING:
        hf_config = _load_config(source, config)
        target_layer_ids = resolve_target_layer_ids(draft, hf_config.num_hidden_layers)
        model = _load_weights(source, config, hf_config)
    return TargetModel(model, target_layer_ids, device, to_end=to_end)


def load_causal_lm(config: TargetConfig, root: Path, device: torch.device) -> Any:
    """The whole target with its head, as Hugging Face runs it: for generating. Raises TargetError as `load_target` does."""
    source = resolve_source(config, root)
    with _LOADING:
        model = _load_weights(source, config, _load_config(source, config))
    return model.requires_grad_(False).eval().to(device)


def target_info(model: Any) -> TargetInfo:
    """What a drafter has to know of a Hugging Face causal LM."""
    return _info(model.config, len(model.model.layers), len(model.model.embed_tokens.weight))


def load_config(config: TargetConfig, root: Path) -> Any:
    """The target's Hugging Face configuration; raises TargetError as `load_target` does."""
    with _LOADING:
        return _load_config(resolve_source(config, root), config)


def described_target(hf_config: Any) -> TargetInfo:
    """What a drafter has to know, of what `load_config` gives: without the weights."""
    return _info(hf_config, hf_config.num_hidden_layers, hf_config.vocab_size)


def load_tokenizer(config: TargetConfig, root: Path) -> Any:
    """The target's tokenizer (`PreTrainedTokenizerBase`); raises TargetError."""
    source = resolve_source(config, root)
    with _LOADING:
        return _load(transformers.AutoTokenizer, source, config)


def tokenizer_digest(tokenizer: Any) -> str:
    """16 hex digits that are equal for tokenizers of equal vocabulary and chat template."""
    content = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def resolve_source(config: TargetConfig, root: Path) -> str:
    """The folder of the target, or a hub id as it stands; raises TargetError for neither."""
    folder = root / config.path
    try:
        if folder.is_dir():
            if config.gguf_file and not (folder / config.gguf_file).is_file():
                raise TargetError(f"target.gguf_file must be a file in {folder}, got '{config.gguf_file}'")
            return str(folder)
        if (root / config.path.split("/")[0]).is_dir():  # a mistyped folder: a hub would be asked for it for a minute
            raise TargetError(f"target.path must be a folder or a hub id, got '{config.path}': no such folder {folder}")
    except OSError as error:  # of a folder that may not be entered, or a name that is too long
        raise TargetError(f"target.path {config.path} cannot be used: {error}") from None
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", config.path):
        return config.path
    raise TargetError(f"target.path must be a folder or a hub id such as Qwen/Qwen3-4B, got '{config.path}' (no {folder})")


def resolve_mask_token_id(config: DraftConfig, tokenizer: Any, info: TargetInfo) -> int:
    """The embedding row that stands for a token to be drafted; raises ConfigError.

    Default: the first row without a token, else the last control token that neither the tokenizer itself nor its chat
    template uses.
    """
    if config.mask_token_id is not None:
        if config.mask_token_id >= info.vocab_size:
            raise ConfigError(
                f"draft.mask_token_id must be below the {info.vocab_size} embedding rows, got {config.mask_token_id}"
            )
        return config.mask_token_id
    taken = set(tokenizer.get_vocab().values())
    free = next((row for row in range(info.vocab_size) if row not in taken), None)
    if free is not None:
        return free
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = str(tokenizer.chat_template)
    unused = [
        row
        for row, token in tokenizer.added_tokens_decoder.items()
        if token.special and row not in named and token.content not in template
    ]
    if not unused:
        raise ConfigError("draft.mask_token_id is required: every embedding row of the target has a token that may be in use")
    return int(max(unused))


def _load_config(source: str, target: TargetConfig) -> Any:
    hf_config = _load(transformers.AutoConfig, source, target)
    if hf_config.model_type not in MODEL_TYPES:
        allowed = ", ".join(MODEL_TYPES)
        raise TargetError(f"target.path {target.path}: model_type must be one of {allowed}, got {hf_config.model_type}")
    rope_type = hf_config.rope_parameters["rope_type"]
    if rope_type in MOVING_ROPE_TYPES:
        refused = " or ".join(MOVING_ROPE_TYPES)
        raise TargetError(f"target.path {target.path}: rope_type must not be {refused}, got {rope_type}")
    return hf_config


def _load_weights(source: str, target: TargetConfig, hf_config: Any) -> Any:
    options: dict[str, Any] = {"dtype": getattr(torch, target.dtype), "output_loading_info": True}
    if target.gguf_file and hasattr(transformers, "GgufConfig"):  # newer transformers would keep the weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, loaded = _load(transformers.AutoModelForCausalLM, source, target, config=hf_config, **options)
    if loaded["missing_keys"]:
        missing = sorted(loaded["missing_keys"])
        raise TargetError(f"target.path {target.path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return model


def _load(kind: Any, source: str, target: TargetConfig, **options: Any) -> Any:
    """`kind.from_pretrained`, with what it raises as one sentence."""
    transformers.utils.logging.disable_progress_bar()  # it would fill a log file
    if target.gguf_file:
        options["gguf_file"] = target.gguf_file
    try:
        return kind.from_pretrained(source, **options)
    except Exception as error:  # whatever a broken file makes of foreign code
        where = "" if Path(source).is_dir() else " (no such folder under run.root, so it is taken as a hub id)"
        spoken = isinstance(error, OSError | ValueError | ImportError | RuntimeError)  # others are for programmers
        reason = " ".join(str(error if spoken else f"{type(error).__name__}: {error}").split()) or type(error).__name__
        raise TargetError(f"target.path {target.path}{where} cannot be loaded: {reason}") from error


def _info(config: Any, num_layers: int, vocab_size: int) -> TargetInfo:
    return TargetInfo(
        model_type=config.model_type,
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        vocab_size=vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: dict[int | None, AttentionMask],
    scaling: float,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Hugging Face's attention call, with `attend` and the mask of the layer's window; [B, H, S, C] -> [B, S, H, C]."""
    del module
    return attend(query, key, value, attention_mask[sliding_window], scaling).transpose(1, 2), None


transformers.AttentionInterface.register(_ATTENTION, _packed_attention)
