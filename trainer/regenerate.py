"""Chats whose answers the target writes anew, kept as they come, so that a killed run goes on where it was.

A module of its own between `trainer.answers`, which answers, and `trainer.prepare`, which makes shards. Every user's turn is
asked in order, after what was asked and answered before it. The journal is JSON lines: what it was made with, then one
conversation a line, with the number that it has in the input; one whose line was cut short by a kill is asked again. An
answer that does not end is kept as far as it goes, for it is what the target says; nothing is asked after it.
"""

import contextlib
import fcntl
import itertools
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.answers import Answer, Answers
from trainer.conversations import HALF, Messages, holds_half
from trainer.errors import DataError, sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class Regeneration:
    """How the target is to answer."""

    temperature: float = 0.0
    """0 is greedy."""
    max_new_tokens: int = 1024
    """Of an answer; a longer one is kept as far as that, and the last of its conversation."""
    num_rows: int = 64
    """Answers in progress at once."""
    seed: int = 0
    """Of sampling here; a server has its own."""
    device: str = "cpu"
    server: str | None = None
    """URL of an OpenAI-compatible server that runs the target, up to `/v1`. None: the target runs here."""
    server_model: str | None = None
    """What the server calls the target. None: the target's own path."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is."""

    done: int
    """Conversations, those of earlier starts included."""
    total: int
    conversations_per_s: float
    """Of this start, like tokens."""
    tokens_per_s: float
    remaining_s: float | None
    """None until something is done."""


def regenerate(
    questions: Sequence[Messages],
    answers: Callable[[int, int], Answers],
    journal: Path,
    made_with: dict[str, Any],
    tell: Callable[[Progress], object] = lambda _progress: None,
) -> None:
    """Have all `questions` (chats without answers) answered into `journal`; raises DataError.

    `answers` is only called if something is left to be asked, with how many conversations are answered already and how many are
    left. A journal that was `made_with` something else is refused.
    """
    with _sentences(journal), _locked(journal) as file:
        known = _scan(journal, made_with, len(questions))
        left = deque(i for i in range(len(questions)) if i not in known)
        if not left:
            return
        somebody = answers(len(known), len(left))
        start, done, tokens = time.monotonic(), 0, 0
        chats: dict[int, Messages] = {}
        again: deque[int] = deque()
        while left or again or chats:
            while somebody.num_free and (again or left):
                key = again.popleft() if again else left.popleft()
                chat = chats.setdefault(key, [])
                _ask_next(chat, questions[key])
                somebody.submit(key, list(chat))
            for answer in somebody.collect():
                tokens += answer.num_tokens
                chat = chats[answer.key]
                if answer.text is not None and not answer.why_not:
                    chat.append({"role": "assistant", "content": answer.text})
                    if len(_questions_of(chat)) < len(_questions_of(questions[answer.key])):
                        again.append(answer.key)
                        continue
                if file.seek(0, os.SEEK_END) == 0:
                    _write(file, {"made_with": made_with})
                _write(file, _line(answer, chats.pop(answer.key)))
                done += 1
                seconds = max(time.monotonic() - start, 1e-9)
                remaining = (len(questions) - len(known) - done) * seconds / done
                tell(Progress(len(known) + done, len(questions), done / seconds, tokens / seconds, remaining))


def regenerated(
    journal: Path, made_with: dict[str, Any], num_questions: int, dropped: Counter[str], causes: dict[str, str]
) -> Iterator[tuple[Messages, str]]:
    """The conversations of a journal in the order of its questions, each with how the answer that does not end begins, or "".

    Those without any answer are counted by reason; `causes` takes the first cause of a reason that has one.
    """
    known = _scan(journal, made_with, num_questions)
    if not known:  # nothing was asked, so there is no journal
        return
    with _sentences(journal), journal.open("rb") as file:
        for key in sorted(known):
            file.seek(known[key])
            line = json.loads(file.readline())
            if any(map(holds_half, [*(message["content"] for message in line["messages"]), line.get("unfinished", "")])):
                dropped[f"its answer {HALF}"] += 1
            elif line["messages"]:
                yield line["messages"], line.get("unfinished", "")
            else:
                dropped[line["why_not"]] += 1
                if line.get("cause"):
                    causes.setdefault(line["why_not"], line["cause"])


@contextlib.contextmanager
def _locked(journal: Path) -> Iterator[Any]:
    """The journal for appending, ours alone; one without a line does not stay."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{journal} is being written by another `python -m trainer.prepare`; wait for it to end") from None
        try:
            yield file
        finally:
            if file.seek(0, os.SEEK_END) == 0:
                journal.unlink()


def _questions_of(messages: Messages) -> Messages:
    return [message for message in messages if message["role"] == "user"]


def _ask_next(chat: Messages, questions: Messages) -> None:
    """Append what the user says next, and what the system says before it."""
    num_taken = sum(message["role"] != "assistant" for message in chat)
    for message in questions[num_taken:]:
        chat.append(message)
        if message["role"] == "user":
            return


def _line(answer: Answer, chat: Messages) -> dict[str, Any]:
    """A conversation up to its last answer, or to the question before one that does not end, and what ended it early."""
    told = {"index": answer.key, "messages": chat, "why_not": answer.why_not}
    if answer.cause:
        told |= {"cause": answer.cause}
    if answer.text is not None and answer.why_not:
        return told | {"unfinished": answer.text}
    while chat and chat[-1]["role"] != "assistant":
        chat.pop()
    return told


def _scan(journal: Path, made_with: dict[str, Any], num_questions: int) -> dict[int, int]:
    """Where the line of each conversation begins, by number; what a kill has torn off is cut from the file."""
    known: dict[int, int] = {}
    before, end, number = made_with, 0, 0
    with _sentences(journal), contextlib.suppress(FileNotFoundError), journal.open("rb") as file:
        try:
            for line in itertools.takewhile(lambda line: line.endswith(b"\n"), file):
                number += 1
                told = json.loads(line)
                if end == 0:
                    before = dict(told["made_with"])
                else:
                    _check_line(told, num_questions)
                    known[told["index"]] = end
                end += len(line)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise DataError(
                f"{journal} must hold answers of `python -m trainer.prepare`, line {number} does not ({sentence(error)}); "
                + ("remove the file to begin anew" if number == 1 else "remove that line, or the file to begin anew")
            ) from None
        if end < os.fstat(file.fileno()).st_size:
            os.truncate(journal, end)
    different = [key for key in made_with if before.get(key) != made_with[key]]
    if different:
        key = different[0]
        raise DataError(
            f"{journal} holds answers that were made otherwise: {key} was {before.get(key)!r}, is {made_with[key]!r}; "
            "remove it to begin anew, or choose another output"
        )
    return known


def _check_line(told: Any, num_questions: int) -> None:
    """Raises LookupError, TypeError or ValueError for what `_line` would not have made of one of so many questions."""
    texts = [told["why_not"], told.get("unfinished", ""), told.get("cause", "")]
    texts += [message[key] for message in told["messages"] for key in ("role", "content")]
    if type(told["index"]) is not int or not all(isinstance(text, str) for text in texts):
        raise TypeError("a value is of the wrong type")
    if not 0 <= told["index"] < num_questions:
        raise ValueError(f"index must be 0..{num_questions - 1}, got {told['index']}")


def _write(file: Any, value: dict[str, Any]) -> None:
    file.write(json.dumps(value).encode() + b"\n")
    file.flush()


@contextlib.contextmanager
def _sentences(journal: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{journal} cannot be used: {error}") from None
