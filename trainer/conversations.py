"""Conversations and prompts out of JSON lines.

A module of its own because data are made from conversations, and drafters measured on prompts. A line holds a chat, as
`messages` (role, content) or ShareGPT `conversations` (from, value); for prompts it may also be a text or have one as `prompt`.
A line that is none of these is a DataError; a chat that nothing can be learnt from raises Dropped. A chat with a turn that is
of no use ends before it if an answer stands there, because a conversation's beginning is itself a conversation; a system turn
without text says nothing and is left out.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from trainer.errors import DataError

Messages = list[dict[str, str]]
_T = TypeVar("_T")
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_SURROGATE = re.compile("[\ud800-\udfff]")
HALF = "holds half a character (a lone surrogate)"
"""Why a text is of no use: no tokenizer takes it."""


class Dropped(Exception):
    """A conversation that is left out; the text is the reason, the same for all of its kind."""


def conversations(paths: Iterable[Path], dropped: Counter[str], left_out: Counter[str]) -> Iterator[Messages]:
    """Chats up to their last answer; those that are of no use are counted by reason, and those that lack turns by which."""
    for path in paths:
        for where, record in _records(path):
            try:
                messages, lacks = _messages(_turns(record, where))
                messages = _up_to_last_answer(messages)
            except Dropped as reason:
                dropped[str(reason)] += 1
            else:
                left_out.update(lacks)
                yield messages


def prompts(path: Path) -> Iterator[Messages]:
    """What stands before each line's first answer; what is of no use as a prompt is a DataError here."""
    for where, record in _records(path):
        turns = _prompt_or_turns(record, where)
        try:
            messages, _ = _messages(turns)
        except Dropped as reason:
            raise DataError(f"{where}: no prompt: {reason}") from None
        prompt = before_answer(messages)
        if not prompt or prompt[-1]["role"] != "user":
            raise DataError(f"{where}: no prompt: the user says nothing before the assistant")
        yield prompt


def questions(paths: Iterable[Path], dropped: Counter[str], left_out: Counter[str]) -> Iterator[Messages]:
    """Chats without their answers; a line may be a prompt, too. Those that ask nothing or lack turns are counted alike."""
    for path in paths:
        for where, record in _records(path):
            try:
                messages, lacks = _messages(_prompt_or_turns(record, where))
                if not any(message["role"] == "user" for message in before_answer(messages)):
                    raise Dropped("the user says nothing before the assistant")
            except Dropped as reason:
                dropped[str(reason)] += 1
            else:
                left_out.update(lacks)
                yield [message for message in messages if message["role"] != "assistant"]


def holds_half(text: str) -> bool:
    """Whether there is a lone surrogate in it, as JSON may bring one."""
    return _SURROGATE.search(text) is not None


def before_answer(messages: Messages) -> Messages:
    """The turns before the first answer."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first]


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(path:line, its JSON value) of each line that is not blank."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _json(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _json(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from None


def _prompt_or_turns(record: Any, where: str) -> list[Any]:
    text = record.get("prompt") if isinstance(record, dict) else record
    return [{"role": "user", "content": text}] if isinstance(text, str) else _turns(record, where)


def _turns(record: Any, where: str) -> list[Any]:
    turns = _first(list, record, "messages", "conversations") if isinstance(record, dict) else None
    if turns is None:
        raise DataError(f"{where}: needs a list `messages` (role, content) or `conversations` (from, value)")
    return turns


def _messages(turns: list[Any]) -> tuple[Messages, set[str]]:
    """The turns as far as they are of use, and which are left out; raises Dropped if no answer stands before those."""
    messages: Messages = []
    left_out = set()
    for turn in turns:
        try:
            message = _message(turn)
        except Dropped as reason:
            if len(before_answer(messages)) == len(messages):
                raise
            return messages, left_out | {f"all from where {reason}"}
        if message["content"]:
            messages.append(message)
        else:
            left_out.add("a system turn without text")
    return messages, left_out


def _message(turn: Any) -> dict[str, str]:
    """Role and text, which may be empty of the system's alone; raises Dropped."""
    if not isinstance(turn, dict):
        raise Dropped("a turn is not an object")
    role, content = _first(str, turn, "role", "from"), _first(str, turn, "content", "value")
    if role not in _ROLES:
        raise Dropped("a role is none of system, user (human), assistant (gpt)")
    if content is None and role == "system" and not (turn.get("content") or turn.get("value")):
        content = ""
    if content is None or not (content.strip() or role == "system"):
        raise Dropped("a turn has no text")
    if holds_half(content):
        raise Dropped(f"a turn's text {HALF}")
    return {"role": _ROLES[role], "content": content.strip()}


def _up_to_last_answer(messages: Messages) -> Messages:
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise Dropped("the assistant says nothing")
    if "user" not in [message["role"] for message in before_answer(messages)]:
        raise Dropped("the assistant speaks before the user")
    return messages


def _first(kind: type[_T], record: dict[str, Any], *keys: str) -> _T | None:
    """The first of these values that is of this kind."""
    return next((record[key] for key in keys if isinstance(record.get(key), kind)), None)
