"""Decoding by the target alone and by target and drafter together, losslessly, one prompt at a time.

A round drafts a block after the last known token, lets the target read the whole block at once, and keeps what the target
agrees with and one token of its own (the bonus). Greedy, the tokens are those of plain decoding wherever the arithmetic of one
token and of several is the same; sampled, their distribution is the target's.

Nothing is recomputed: one cache holds the keys and values of what the target has read, another what the drafter makes of the
context features, for that is the same in every later round. On a GPU both ways run as captured graphs, as servers do; eager, a
small target would wait for launches most of the time. Used by one thread; each round waits for the device once. Shape legend:
`trainer.batch`; T counts tokens read at once.

Sources: DFlash (arXiv 2602.06036); rejection sampling: arXiv 2211.17192, algorithm 1.
"""

import functools
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.errors import ConfigError
from trainer.graphs import Graphs, StageFacts
from trainer.model.cached import CachedDrafter, CachedTarget
from trainer.model.draft import DraftModel

_KEY_STEP = 256
"""Attention looks at a multiple of these: a graph for each."""
MIN_TEMPERATURE = 1e-3
"""Above 0. Less is greedy in all but name, and logits divided by it leave fp32 in the end."""
TEMPERATURES = f"0 or a finite number of at least {MIN_TEMPERATURE:g}"


def is_temperature(value: float) -> bool:
    """Whether `Sampling` can use it."""
    return value == 0 or MIN_TEMPERATURE <= value < math.inf


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


class Decoder:
    """A target, and a drafter if there is one, that answer one prompt after another; on a GPU every step is a graph."""

    def __init__(self, model: Any, max_tokens: int, drafter: DraftModel | None = None) -> None:
        """`model` is a Hugging Face causal LM; `max_tokens` bounds a prompt and its response together."""
        self._device = device = model.device
        self._block_size = drafter.spec.block_size if drafter else 1
        num_slots = max_tokens + self._block_size  # what is rejected lies behind the last token
        self._target = CachedTarget(model, drafter.spec.target_layer_ids if drafter else ())
        self._cache = self._target.new_cache(1, num_slots)
        self._num_slots = num_slots
        self._length = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros((1, self._block_size), dtype=torch.int64, device=device)
        head = model.get_output_embeddings().weight
        self._logits = torch.zeros((self._block_size, len(head)), dtype=head.dtype, device=device)
        self._draft_logits = torch.zeros_like(self._logits[1:])
        self._drafter = CachedDrafter(drafter, model.get_input_embeddings().weight, head, num_slots) if drafter else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graphs = Graphs("threadwarm", device, StageFacts(str(device)))
        self._steps: dict[int, list[Callable[[], None]]] = {}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(device))  # the weights are on their way

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Collection[int], sampling: Sampling) -> Response:
        """Plain decoding: one token a call of the target."""
        with torch.cuda.stream(self._stream):
            self._capture(len(prompt), max_new_tokens)
            response = self._begin(prompt, stop_ids, sampling)
            tokens, start = response.tokens, _now(self._device)
            while not response.ended and len(tokens) < max_new_tokens:
                read_on, *_ = self._point_at(len(prompt) + len(tokens) - 1, tokens[-1])
                read_on()
                tokens.append(int(sampling.choose(self._logits[:1])))
                response.ended = tokens[-1] in stop_ids
            response.decode_s = _now(self._device) - start
        return response

    @torch.inference_mode()
    def decode_with_drafter(
        self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Collection[int], sampling: Sampling
    ) -> Response:
        """Speculative decoding, for which there is a drafter; the response is lossless, which is what the module says of it."""
        with torch.cuda.stream(self._stream):
            self._capture(len(prompt), max_new_tokens)
            response = self._begin(prompt, stop_ids, sampling)
            tokens, start = response.tokens, _now(self._device)
            while not response.ended and len(tokens) < max_new_tokens:
                room = max_new_tokens - len(tokens)
                _, draft, verify = self._point_at(len(prompt) + len(tokens) - 1, tokens[-1])
                draft()
                drafted = sampling.choose(self._draft_logits)
                self._tokens[0, 1:] = drafted
                verify()
                new = _kept(self._logits, self._draft_logits, drafted, sampling)
                num_accepted = len(new) - 1
                new = new[:room]
                stop = next((i for i, token in enumerate(new) if token in stop_ids), None)
                if stop is not None:
                    new, response.ended = new[: stop + 1], True
                tokens += new
                response.rounds.append(Round(min(len(drafted), room), min(num_accepted, len(new)), len(new)))
            response.decode_s = _now(self._device) - start
        return response

    def _begin(self, prompt: Sequence[int], stop_ids: Collection[int], sampling: Sampling) -> Response:
        """Read the prompt and choose the first token."""
        start = _now(self._device)
        hidden, features = self._target.begin(self._cache, torch.tensor([list(prompt)], device=self._device))
        if self._drafter and features is not None:
            self._drafter.read(features, self._length.zero_())
        first = int(sampling.choose(self._target.logits(hidden[0, -1:])))
        return Response([first], first in stop_ids, _now(self._device) - start)

    def _point_at(self, length: int, last_token: int) -> list[Callable[[], None]]:
        """What can be done next; the last token was chosen, not read: it follows the `length` tokens that are in the caches."""
        self._length.fill_(length)
        self._tokens[0, 0] = last_token
        return self._steps[self._num_keys(length)]

    def _num_keys(self, length: int) -> int:
        """How many are looked at behind `length` tokens: if it were all, one long prompt would slow down the others."""
        return min(-(-(length + self._block_size) // _KEY_STEP) * _KEY_STEP, self._num_slots)

    def _capture(self, num_prompt: int, max_new_tokens: int) -> None:
        """Make what a response may need, before its time is taken: one token of the target, a block drafted, a block read."""
        needed = {self._num_keys(length) for length in range(num_prompt, num_prompt + max_new_tokens)}
        bodies = [self._read_one, *([self._draft_block, self._read_block] if self._drafter else [])]
        for num_keys in sorted(needed - set(self._steps)):
            steps = [functools.partial(body, num_keys) for body in bodies]
            for step in steps:
                self._graphs.warm_up(step)
            self._steps[num_keys] = [self._graphs.ready(step) for step in steps]

    def _read_one(self, num_keys: int) -> None:
        hidden, _ = self._target.read(self._cache, self._tokens[:, :1], self._length, num_keys)
        self._logits[:1] = self._target.logits(hidden[0])

    def _draft_block(self, num_keys: int) -> None:
        assert self._drafter is not None
        self._draft_logits.copy_(self._drafter.draft(self._tokens[0, :1], self._length, num_keys))

    def _read_block(self, num_keys: int) -> None:
        assert self._drafter is not None
        hidden, features = self._target.read(self._cache, self._tokens, self._length, num_keys)
        assert features is not None
        self._drafter.read(features, self._length)
        self._logits.copy_(self._target.logits(hidden[0]))


def _kept(logits: Tensor, draft_logits: Tensor, drafted: Tensor, sampling: Sampling) -> list[int]:
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
    """A device by its name; raises ConfigError."""
    if name != "cpu" and not (name.startswith("cuda:") and name[5:].isdecimal() and int(name[5:]) < torch.cuda.device_count()):
        raise ConfigError(f"the device must be cpu or one of the {torch.cuda.device_count()} GPUs as cuda:N, got {name}")
    return torch.device(name)


def _now(device: torch.device) -> float:
    """Seconds, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
