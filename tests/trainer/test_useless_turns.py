"""A turn that is of no use costs what stands behind it, not the whole conversation."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from trainer import prepare
from trainer.conversations import questions
from trainer.dataset import open_shards

TEMPLATE = """\
{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}\
{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def chat(*texts: Any, system: Any = "none") -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": turns if system == "none" else [{"role": "system", "content": system}, *turns]}


def write(folder: Path, *records: Any) -> Path:
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "chats.jsonl"


def test_what_stands_before_a_useless_turn_is_kept_and_told(
    make_target: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target(TEMPLATE)
    tool = {"role": "tool", "content": "x"}
    given = write(
        tmp_path,
        chat("a", "bc", system=""),
        chat("d", "ef", system=None),
        {"conversations": [{"from": "system", "value": " "}, *chat("g", "hi")["messages"]]},
        chat("j", "kl", ""),
        chat("m", "no", "p", None, "q", "rs"),
        {"messages": [*chat("t", "uv")["messages"], tool, *chat("w", "xy")["messages"]]},
        {"messages": [tool, *chat("t", "uv")["messages"]]},
        chat("a", ""),
        chat("a", "b", system=[{"type": "text", "text": "Be brief"}]),
    )
    command = ["--input", str(given), "--output", str(tmp_path / "out"), "--target", str(target), "--held-out", "0"]
    assert prepare.main(command) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    shards = open_shards(tmp_path / "out", "train")
    documents = [shards.document(i) for i in range(len(shards))]
    pairs = (("a", "bc"), ("d", "ef"), ("g", "hi"), ("j", "kl"), ("m", "no"), ("t", "uv"))
    assert [tokenizer.decode(tokens) for tokens, _ in documents] == [f"[user]{a}[assistant]{b}<|end|>" for a, b in pairs]
    assert [tokenizer.decode(tokens[mask]) for tokens, mask in documents] == [f"{b}<|end|>" for _, b in pairs]
    assert capsys.readouterr().out.partition("\nleft")[2] == (
        " out of 3 conversations: a system turn without text\n"
        "left out of 2 conversations: all from where a turn has no text\n"
        "left out of 1 conversations: all from where a role is none of system, user (human), assistant (gpt)\n"
        "dropped 3\n"
        "  2  a turn has no text\n"
        "  1  a role is none of system, user (human), assistant (gpt)\n"
        f"wrote {tmp_path / 'out'}\n"
    )
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert sum(meta["left_out"].values()) == 6


def test_a_question_behind_a_useless_turn_is_not_asked(tmp_path: Path) -> None:
    dropped: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    given = write(tmp_path, chat("a", "b", "c", "", "d"), chat("a", "b", system=""), "e", chat("a", None))
    asked = list(questions([given], dropped, left_out))
    assert [[message["content"] for message in messages] for messages in asked] == [["a", "c"], ["a"], ["e"]]
    assert dropped == {"a turn has no text": 1}
    assert left_out == {"all from where a turn has no text": 1, "a system turn without text": 1}
