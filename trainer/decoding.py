"""Decoding by the target alone and by target and drafter together, losslessly, one prompt at a time.

A round drafts a block after the last known token, lets the target read the whole block at once, and keeps what the target
agrees with and one token of its own (the bonus). Greedy, the tokens are those of plain decoding wherever the arithmetic of one
token and of several is the same; sampled, their distribution is the target's.

Both caches grow with the text and are never recomputed: the target's holds what it has read, the drafter's holds the keys and
values of the context features, for they are the same in every later round. Used by one thread; each round waits for the device
once. Shape legend: `trainer.batch`; T counts tokens read at once.

Sources: DFlash (arXiv 2602.06036); rejection sampling: arXiv 2211.17192, algorithm 1.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from trainer.errors import ConfigError
from trainer.model.attention import decoding_mask
from trainer.model.draft import DraftModel, KeysValues


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits."""

    temperature: float
    """0 is greedy."""
    generator: torch.Generator
    """On the device of the logits; not touched by greedy decoding."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., V] in fp32; for a temperature above 0."""
        return torch.softmax(logits.float() / self.temperature, dim=-1)

    def draw(self, probabilities: Tensor) -> Tensor:
        """[T, V] -> [T] token ids; rows need not add up to 1."""
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]

    def choose(self, logits: Tensor) -> Tensor:
        """[T, V] -> [T] token ids."""
        return self.draw(self.probabilities(logits)) if self.temperature > 0 else logits.argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class Round:
    """One verification."""

    num_drafted: int
    """Draft tokens that lie within the length limit."""
    num_accepted: int
    """Of those, the ones that became part of the response."""
    num_produced: int
    """Tokens that the response grew by; the bonus is one unless the response ended before it."""


@dataclass(slots=True)
class Response:
    """What came after a prompt, the stop token included."""

    tokens: list[int]
    ended: bool
    """By a stop token, not by the limit."""
    prefill_s: float
    """Until the first token."""
    decode_s: float = 0.0
    """For all others."""
    rounds: list[Round] = field(default_factory=list)
    """Of speculative decoding."""


class CachedTarget:
    """A Hugging Face causal LM that reads on where it stopped, and can forget."""

    def __init__(self, model: Any, target_layer_ids: Sequence[int] = ()) -> None:
        """`target_layer_ids` are the layers whose outputs `read` gives."""
        self.model = model
        self._layers = target_layer_ids
        self._cache = transformers.DynamicCache()  # without a configuration: windowed layers keep all, so all can be forgotten

    def read(self, tokens: Tensor, num_logits: int) -> tuple[Tensor, Tensor | None]:
        """[T] ids -> logits [num_logits, V] of the last ones, and features [1, T, L*D] if layers are tapped."""
        out = self.model(
            tokens[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=num_logits,
            output_hidden_states=bool(self._layers),
        )
        features = torch.cat([out.hidden_states[k + 1] for k in self._layers], dim=-1) if self._layers else None
        return out.logits[0], features

    def forget(self, num_kept: int) -> None:
        """Keep what was read of the first `num_kept` tokens."""
        excess = self._cache.get_seq_length() - num_kept
        if excess > 0:
            self._cache.crop(-excess)


class CachedDrafter:
    """A drafter that keeps its context's keys and values."""

    def __init__(self, model: DraftModel, embedding_VE: Tensor, head_VE: Tensor) -> None:
        """Embedding and head are the target's; all lie on one device."""
        self.model = model
        self._embedding, self._head = embedding_VE, head_VE
        self._context: list[KeysValues] | None = None
        self._length = 0

    def read(self, features_1TL: Tensor) -> None:
        """Take in the features of the next T tokens."""
        positions = self._length + torch.arange(features_1TL.shape[1], device=features_1TL.device)[None]
        context, rotary = self.model.context(features_1TL), self.model.rotary(positions)
        new = [layer.self_attn.keys_values(context, rotary) for layer in self.model.layers]
        if self._context is not None:
            new = [(torch.cat((k, a), 2), torch.cat((v, b), 2)) for (k, v), (a, b) in zip(self._context, new, strict=True)]
        self._context, self._length = new, self._length + features_1TL.shape[1]

    def draft(self, anchor: int, num_drafted: int) -> Tensor:
        """Logits [num_drafted, V] of the tokens after `anchor`, which itself follows all that was read."""
        assert self._context is not None
        tokens = torch.full((1, num_drafted + 1), self.model.spec.mask_token_id, device=self._embedding.device)
        tokens[0, 0] = anchor
        rotary = self.model.rotary(self._length + torch.arange(num_drafted + 1, device=tokens.device)[None])
        hidden = F.embedding(tokens, self._embedding).to(self.model.spec.dtype)
        windows = self.model.spec.layer_windows
        masks = {w: decoding_mask(self._length, num_drafted + 1, w, tokens.device) for w in set(windows) if w is not None}
        for layer, context, window in zip(self.model.layers, self._context, windows, strict=True):
            hidden = layer(hidden, context, rotary, masks.get(window))
        return self.model.norm(hidden)[0, 1:].to(self._head.dtype) @ self._head.T


@torch.inference_mode()
def decode(model: Any, prompt: Sequence[int], max_new_tokens: int, stop_ids: Collection[int], sampling: Sampling) -> Response:
    """Plain decoding: one token a call of the target."""
    target = CachedTarget(model)
    response = _begin(target, prompt, stop_ids, sampling)
    tokens, start = response.tokens, _now(model.device)
    while not response.ended and len(tokens) < max_new_tokens:
        logits, _ = target.read(_ids(tokens[-1:], model.device), 1)
        tokens.append(int(sampling.choose(logits)))
        response.ended = tokens[-1] in stop_ids
    response.decode_s = _now(model.device) - start
    return response


@torch.inference_mode()
def decode_with_drafter(
    model: Any,
    drafter: DraftModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling,
) -> Response:
    """Speculative decoding; the response is lossless, which is what the module says of it."""
    target = CachedTarget(model, drafter.spec.target_layer_ids)
    cached = CachedDrafter(drafter, model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    response = _begin(target, prompt, stop_ids, sampling, cached)
    tokens, start = response.tokens, _now(model.device)
    while not response.ended and len(tokens) < max_new_tokens:
        room = max_new_tokens - len(tokens)
        num_drafted = min(drafter.spec.block_size - 1, room)
        draft_logits = cached.draft(tokens[-1], num_drafted)
        drafted = sampling.choose(draft_logits)
        logits, features = target.read(torch.cat((_ids(tokens[-1:], model.device), drafted)), num_drafted + 1)
        new = _verify(logits, draft_logits, drafted, sampling)
        num_accepted = len(new) - 1
        new = new[:room]
        stop = next((i for i, token in enumerate(new) if token in stop_ids), None)
        if stop is not None:
            new, response.ended = new[: stop + 1], True
        tokens += new
        response.rounds.append(Round(num_drafted, min(num_accepted, len(new)), len(new)))
        target.forget(len(prompt) + len(tokens) - 1)  # the last token was chosen, not read
        assert features is not None
        cached.read(features[:, : len(new)])
    response.decode_s = _now(model.device) - start
    return response


def _begin(
    target: CachedTarget,
    prompt: Sequence[int],
    stop_ids: Collection[int],
    sampling: Sampling,
    drafter: CachedDrafter | None = None,
) -> Response:
    """Read the prompt and choose the first token."""
    device = target.model.device
    start = _now(device)
    logits, features = target.read(_ids(prompt, device), 1)
    if drafter is not None:
        assert features is not None
        drafter.read(features)
    first = int(sampling.choose(logits))
    return Response([first], first in stop_ids, _now(device) - start)


def _verify(logits: Tensor, draft_logits: Tensor, drafted: Tensor, sampling: Sampling) -> list[int]:
    """The drafted tokens that are kept, then the target's own: logits [T+1, V], draft logits [T, V], drafted [T]."""
    if sampling.temperature <= 0:
        chosen = logits.argmax(dim=-1)
        num_accepted, own = (drafted == chosen[:-1]).cumprod(0).sum(), chosen
        kept, *tokens = torch.cat((num_accepted[None], own)).tolist()
        return tokens[: kept + 1]
    target, draft = sampling.probabilities(logits), sampling.probabilities(draft_logits)
    num_accepted, bonus = rejection_sample(target, draft, drafted, sampling)
    kept, last, *tokens = torch.cat((num_accepted[None], bonus[None], drafted)).tolist()
    return [*tokens[:kept], last]


def rejection_sample(target_TV: Tensor, draft_TV: Tensor, drafted: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """How many of the drafted tokens are kept, and the token after them; together they are distributed as the target's.

    `target_TV` [T+1, V] and `draft_TV` [T, V] are probabilities, `drafted` [T] was drawn from `draft_TV`. A token x is kept
    with probability min(1, target(x) / draft(x)); the first that is not is replaced by a draw from max(0, target - draft).
    """
    rows = torch.arange(len(drafted), device=drafted.device)
    chance = torch.rand(len(drafted), generator=sampling.generator, device=drafted.device)
    kept = chance * draft_TV[rows, drafted] < target_TV[rows, drafted]
    num_accepted = kept.cumprod(0).sum()
    # beyond the last drafted token nothing was drafted, so the target's own distribution is what is left
    left_TV = (target_TV - F.pad(draft_TV, (0, 0, 0, 1))).clamp(min=0)
    left_V, target_V = (of_TV.index_select(0, num_accepted[None])[0] for of_TV in (left_TV, target_TV))  # does not wait
    left_V = torch.where(left_V.sum() > 0, left_V, target_V)  # equal but for rounding: any draw will do
    return num_accepted, sampling.draw(left_V[None])[0]


def stop_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """What ends a response: the end tokens of the tokenizer, of the model and of its generation settings."""
    found: set[int] = set()
    for value in (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id):
        found.update([] if value is None else [value] if isinstance(value, int) else value)
    return found


def usable_device(name: str) -> torch.device:
    """The device of a `--device` option; raises ConfigError."""
    if name != "cpu" and not (name.startswith("cuda:") and name[5:].isdecimal() and int(name[5:]) < torch.cuda.device_count()):
        raise ConfigError(f"--device must be cpu or one of the {torch.cuda.device_count()} GPUs as cuda:N, got {name}")
    return torch.device(name)


def _ids(tokens: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=device)


def _now(device: torch.device) -> float:
    """Seconds, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
