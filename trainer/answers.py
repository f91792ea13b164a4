"""The target answers chats: here, in batches whose finished rows are refilled, or through an OpenAI-compatible server.

A module of its own because prepare asks and only this knows how. Both ways take questions with `submit` while `num_free` says
so and give what is finished with `collect`, in any order. LocalAnswers belongs to one thread and waits for the device once a
token; ServerAnswers asks from threads of its own. Shape legend: `trainer.batch`; R counts rows, G key and value heads, C their
width.
"""

import functools
import http.client
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trainer.conversations import HALF, Dropped, Messages, holds_half
from trainer.decoding import Sampling
from trainer.errors import DataError
from trainer.graphs import Graphs, StageFacts
from trainer.model.cached import CachedTarget
from trainer.responses import rendered

_PREFILL_TOKENS = 1 << 15
_REFILL_STEPS = 16
"""Rows that are free wait for company: reading a prompt alone costs as much as a step of all."""
_KEY_STEP = 256
"""Attention looks at a multiple of these, one graph for each."""
_PATIENCE_S = (1.0, 2.0, 4.0, 8.0)
"""Between two tries to reach a server."""
_ANSWER_S = 3600.0
_FAILURES = 32
"""So many questions in a row at which a server fails are its fault, not theirs."""


@dataclass(frozen=True, slots=True)
class Answer:
    """To the question `key`."""

    key: int
    text: str | None
    """None if there is none to be used."""
    why_not: str = ""
    """Why there is none, or, of a text that was broken off, why it does not end."""
    num_tokens: int = 0
    cause: str = ""
    """What a chat template said that refuses it."""


class Answers(Protocol):
    """Somebody who answers."""

    @property
    def num_free(self) -> int:
        """Questions that can be submitted now."""

    def submit(self, key: int, messages: Messages) -> None:
        """Ask for the answer to `messages`, which end with the user's. Raises DataError for what cannot be asked of anybody."""

    def collect(self) -> list[Answer]:
        """Wait until something is finished. Raises DataError if nothing can be any more."""


@dataclass(slots=True)
class _Row:
    key: int
    prompt: list[int]
    num_allowed: int
    tokens: list[int] = field(default_factory=list)


class LocalAnswers:
    """A Hugging Face causal LM that works on up to `num_rows` answers at once."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        stop_ids: Collection[int],
        sampling: Sampling,
        *,
        num_rows: int,
        max_tokens: int,
        max_new_tokens: int,
    ) -> None:
        """`max_tokens` bounds prompt and answer together, as do the model's positions, and `max_new_tokens` the answer."""
        self._tokenizer, self._stop_ids, self._sampling = tokenizer, stop_ids, sampling
        self._max_tokens = max_tokens = min(max_tokens, model.config.max_position_embeddings)
        self._max_new_tokens = max_new_tokens
        self._target = CachedTarget(model)
        self._cache = self._target.new_cache(num_rows, max_tokens)
        self._rows: list[_Row | None] = [None] * num_rows
        self._waiting: list[_Row] = []
        self._refused: list[Answer] = []
        self._num_steps = 0
        self._device = device = model.device
        self._last = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._vocab_size = len(model.get_input_embeddings().weight)
        head = model.get_output_embeddings().weight
        self._logits = torch.zeros((num_rows, len(head)), dtype=head.dtype, device=device)
        self._steps: dict[int, Callable[[], None]] = {}
        self._graphs = Graphs("threadwarm", device, StageFacts(str(device)))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(device))  # the weights are on their way

    @property
    def num_free(self) -> int:
        """Rows without an answer in progress."""
        return self._rows.count(None) - len(self._waiting)

    def submit(self, key: int, messages: Messages) -> None:
        """Take a row; raises DataError for a token that the model does not know, for the tokenizer is another model's then."""
        try:
            text = rendered(self._tokenizer, messages, tokenize=False, add_generation_prompt=True)
        except Dropped as reason:
            self._refused.append(Answer(key, None, str(reason), cause=str(reason.__cause__)))
            return
        prompt = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if max(prompt, default=0) >= self._vocab_size:
            raise DataError(
                f"question {key + 1} holds token id {max(prompt)}, the target's vocabulary has {self._vocab_size}; "
                "its tokenizer must be its own"
            )
        room = self._max_tokens - len(prompt)
        if not prompt:
            self._refused.append(Answer(key, None, "its prompt has no token"))
        elif room <= 0:
            self._refused.append(Answer(key, None, f"its prompt leaves no room within {self._max_tokens} tokens"))
        else:
            self._waiting.append(_Row(key, prompt, min(room, self._max_new_tokens)))

    @torch.inference_mode()
    def collect(self) -> list[Answer]:
        """Decode until a row is finished."""
        finished, self._refused = self._refused, []
        with torch.cuda.stream(self._stream):
            while not finished:
                if self._waiting and (self._num_steps % _REFILL_STEPS == 0 or not any(self._rows)):
                    finished += self._fill()
                else:
                    finished += self._step()
        return finished

    def _fill(self) -> list[Answer]:
        """Read the prompts of some rows that wait, padded at the end, and choose their first tokens."""
        self._waiting.sort(key=lambda row: len(row.prompt))
        longest = len(self._waiting[-1].prompt)
        count = max(1, _PREFILL_TOKENS // longest)
        rows, self._waiting = self._waiting[-count:], self._waiting[:-count]
        places = [i for i, row in enumerate(self._rows) if row is None][: len(rows)]
        tokens = torch.tensor([row.prompt + [0] * (longest - len(row.prompt)) for row in rows])
        lengths = torch.tensor([len(row.prompt) for row in rows], device=self._device)
        cache = self._target.new_cache(len(rows), longest)
        hidden, _ = self._target.begin(cache, tokens.to(self._device))
        self._cache.store(places, cache)
        ends = hidden[torch.arange(len(rows), device=self._device), lengths - 1]
        chosen = self._sampling.choose(self._target.logits(ends))
        at = torch.tensor(places, device=self._device)
        self._last[at], self._lengths[at] = chosen, lengths
        for place, row in zip(places, rows, strict=True):
            self._rows[place] = row
        return self._take(places, chosen.tolist())

    def _step(self) -> list[Answer]:
        """One more token for every row; what empty rows compute is not looked at."""
        self._num_steps += 1
        places = [i for i, row in enumerate(self._rows) if row is not None]
        longest = max(len(row.prompt) + len(row.tokens) for row in self._rows if row is not None)
        num_keys = min(-(-longest // _KEY_STEP) * _KEY_STEP, self._max_tokens)
        if num_keys not in self._steps:
            body = functools.partial(self._read, num_keys)
            self._graphs.warm_up(body)
            self._steps[num_keys] = self._graphs.ready(body)
        self._steps[num_keys]()
        self._last.copy_(self._sampling.choose(self._logits))
        self._lengths[places] += 1
        chosen = self._last.tolist()
        return self._take(places, [chosen[place] for place in places])

    def _read(self, num_keys: int) -> None:
        hidden, _ = self._target.read(self._cache, self._last[:, None], self._lengths, num_keys)
        self._logits.copy_(self._target.logits(hidden[:, -1]))

    def _take(self, places: Sequence[int], tokens: Sequence[int]) -> list[Answer]:
        """Give a token to each of these rows; returns the answers that it ends."""
        finished = []
        for place, token in zip(places, tokens, strict=True):
            row = self._rows[place]
            assert row is not None
            row.tokens.append(token)
            if token in self._stop_ids or len(row.tokens) == row.num_allowed:
                finished.append(self._answer(row))
                self._rows[place] = None
                self._lengths[place] = 0
        return finished

    def _answer(self, row: _Row) -> Answer:
        if row.tokens[-1] not in self._stop_ids:
            within = (
                f"{self._max_new_tokens} tokens"
                if len(row.tokens) == self._max_new_tokens
                else f"the {self._max_tokens} tokens of a conversation"
            )
            # behind its prompt: alone, a word loses the space before it in some tokenizers
            before, text = (
                self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (row.prompt, row.prompt + row.tokens)
            )
            return _broken_off(row.key, text[len(before) :], f"its answer does not end within {within}", len(row.tokens))
        text = self._tokenizer.decode(row.tokens[:-1], skip_special_tokens=True)
        return _worded(row.key, text, len(row.tokens))


@dataclass(frozen=True, slots=True)
class _Failure:
    """The server could not answer this question, which may be the question's fault or the server's."""

    answer: Answer
    error: DataError


class ServerAnswers:
    """An OpenAI-compatible server, asked up to `num_rows` questions at once."""

    def __init__(
        self, url: str, model: str, *, temperature: float, num_rows: int, max_new_tokens: int, works: bool = False
    ) -> None:
        """`url` is what stands before `/chat/completions`; `works` if the server has answered before."""
        self._url = url.rstrip("/") + "/chat/completions"
        self._request = {"model": model, "temperature": temperature, "max_tokens": max_new_tokens}
        self._todo: queue.SimpleQueue[tuple[int, Messages]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Answer | _Failure | Exception] = queue.SimpleQueue()
        self._failures: list[_Failure] = []
        self._works = works
        self._num_free = self._num_rows = num_rows
        for i in range(num_rows):  # daemons: a server that hangs does not keep the process
            threading.Thread(target=self._serve, name=f"ask-{i}", daemon=True).start()

    @property
    def num_free(self) -> int:
        """Threads without a question."""
        return self._num_free

    def submit(self, key: int, messages: Messages) -> None:
        """Ask in a thread."""
        self._num_free -= 1
        self._todo.put((key, messages))

    def collect(self) -> list[Answer]:
        """Wait for an answer; a question at which the server fails is told once it is seen to answer others."""
        if self._num_free == self._num_rows:  # nobody is asked any more
            return self._told_failures()
        answer = self._done.get()
        if isinstance(answer, Exception):
            raise answer
        self._num_free += 1
        if isinstance(answer, _Failure):
            self._failures.append(answer)
            if len(self._failures) == _FAILURES:
                raise answer.error
            return []
        self._works = True
        return [answer, *self._told_failures()]

    def _told_failures(self) -> list[Answer]:
        failures, self._failures = self._failures, []
        if failures and not self._works:
            raise failures[-1].error
        return [failure.answer for failure in failures]

    def _serve(self) -> None:
        while True:
            try:
                self._done.put(self._ask(*self._todo.get()))
            except Exception as error:  # noqa: BLE001 (raised again where it is waited for)
                self._done.put(error)

    def _ask(self, key: int, messages: Messages) -> Answer | _Failure:
        body = json.dumps(self._request | {"messages": messages}).encode()
        for patience in (*_PATIENCE_S, None):
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            failed = ""
            try:
                with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
                    return self._read(key, json.load(response))
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in (400, 413, 422):
                    return Answer(key, None, f"the server refuses it (HTTP {error.code})")
                problem: Exception = error
                if error.code < 500 and error.code != 429:
                    patience = None
                elif error.code not in (429, 503):  # these say that it is the server that is busy or away
                    failed = f"the server fails at it (HTTP {error.code})"
            except (OSError, http.client.HTTPException) as error:
                problem = error
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise DataError(f"server {self._url}: the answer must be a chat completion: {error!r}") from None
            if patience is None:
                unanswered = DataError(f"server {self._url} cannot be asked: {problem}")
                if failed:
                    return _Failure(Answer(key, None, failed), unanswered)
                raise unanswered
            time.sleep(patience)
        raise AssertionError("unreachable")

    def _read(self, key: int, reply: Any) -> Answer:
        choice, usage = reply["choices"][0], reply.get("usage")
        told = usage.get("completion_tokens") if isinstance(usage, dict) else None
        num_tokens = told if isinstance(told, int) else 0
        match choice["finish_reason"]:
            case "stop":
                thoughts, text = _thoughts_and_text(choice["message"])
                if thoughts and text:
                    text = f"<think>\n{thoughts.strip()}\n</think>\n\n{text}"
                return _worded(key, text, num_tokens)
            case "length":
                why_not = f"its answer does not end within {self._request['max_tokens']} tokens"
                thoughts, text = _thoughts_and_text(choice["message"])
                if not thoughts:  # where a template begins them is not known here
                    return _broken_off(key, text, why_not, num_tokens)
            case reason:
                why_not = f"its answer ends with finish_reason {reason!r}"
        return Answer(key, None, why_not, num_tokens)


def _thoughts_and_text(message: Any) -> tuple[str, str]:
    """`reasoning` is vLLM's field for thoughts, `reasoning_content` its old one and that of other servers."""
    return message.get("reasoning") or message.get("reasoning_content") or "", message.get("content") or ""


def _worded(key: int, text: str, num_tokens: int) -> Answer:
    text = text.strip()
    if holds_half(text):
        return Answer(key, None, f"its answer {HALF}", num_tokens)
    return Answer(key, text, "", num_tokens) if text else Answer(key, None, "its answer has no text", num_tokens)


def _broken_off(key: int, text: str, why_not: str, num_tokens: int) -> Answer:
    """As it was begun, spaces before it too; a character of which bytes are missing is left out."""
    text = text.rstrip("\ufffd").rstrip()
    if holds_half(text):
        return Answer(key, None, f"its answer {HALF}", num_tokens)
    return Answer(key, text or None, why_not, num_tokens)
