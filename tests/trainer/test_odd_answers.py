"""What a server answers and what a journal holds may be odd: it costs one conversation, or is one sentence."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers

from trainer import prepare
from trainer.dataset import open_shards

TEMPLATE = """\
{% for m in messages %}{% if m.role == 'assistant' %} w8 {{ m.content }} </s>\
{% else %} w7 {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} w8 {% endif %}"""
HALF = "w5 \ud83d w6"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("target")
    tiny.make(root)
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "target")
    return root / "target"


@contextlib.contextmanager
def serving(messages_by_question: dict[str, dict[str, Any]], finish: str = "stop") -> Iterator[str]:
    """The URL of a server that answers so, and other questions with words."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = messages_by_question.get(request["messages"][-1]["content"], {"content": "w5 w6"})
            body = json.dumps({"choices": [{"message": message, "finish_reason": finish}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def call(folder: Path, target: Path, url: str, *questions: list[str]) -> int:
    """Each question is what a user says, turn after turn."""
    chats = [[{"role": "user", "content": text} for text in texts] for texts in questions]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    given = ["--input", str(folder / "chats.jsonl"), "--output", str(folder / "out"), "--target", str(target)]
    return prepare.main([*given, "--regenerate", "--server", url, "--max-tokens", "48", "--held-out", "0"])


def journal(folder: Path) -> Path:
    return folder / "out.regenerated.jsonl"


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("message", [{"content": HALF}, {"content": "w5", "reasoning": HALF}])
def test_an_answer_that_holds_half_a_character_is_dropped_alone(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], finish: str, message: dict[str, Any]
) -> None:
    with serving({"w2": message}, finish) as url:
        assert call(tmp_path, target, url, ["w1"], ["w2", "w3"], ["w4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("kept 2 of 3 conversations")
    told = "its answer holds half a character (a lone surrogate)"
    thoughts_broken_off = finish == "length" and "reasoning" in message  # which are of no use anyway
    assert f"  1  {'its answer does not end within 1024 tokens' if thoughts_broken_off else told}\n" in out
    assert len(open_shards(tmp_path / "out", "train")) == 2


@pytest.mark.parametrize("place", ["messages", "unfinished"])
def test_a_journal_that_holds_half_a_character_already_costs_that_conversation(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    with serving({}) as url:
        assert call(tmp_path, target, url, ["w1"], ["w2"]) == 0
        made_with, first, second = map(json.loads, journal(tmp_path).read_text().splitlines())
        if place == "messages":
            second["messages"][-1]["content"] = HALF
        else:
            del second["messages"][-1]
            second |= {"unfinished": HALF, "why_not": "its answer does not end"}
        journal(tmp_path).write_text("".join(json.dumps(line) + "\n" for line in (made_with, first, second)))
        (tmp_path / "out").rename(tmp_path / "before")
        capsys.readouterr()
        assert call(tmp_path, target, url, ["w1"], ["w2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("kept 1 of 2 conversations")
    assert "  1  its answer holds half a character (a lone surrogate)\n" in out
