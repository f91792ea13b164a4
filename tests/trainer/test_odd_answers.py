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
import torch
import transformers

from trainer import prepare
from trainer.answers import LocalAnswers
from trainer.config import TargetConfig
from trainer.dataset import open_shards
from trainer.decoding import Sampling
from trainer.model.target import load_causal_lm

HALF = "w5 \ud83d w6"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_with_template(tmp_path_factory.mktemp("target"))


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


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda line: line.pop("messages"), "KeyError: 'messages')"),
        (lambda line: line.update(messages=5), "TypeError: "),
        (lambda line: line.update(messages=["w1"]), "TypeError: "),
        (lambda line: line.update(messages=[{"role": "user", "content": None}]), "TypeError: a value is of the wrong type)"),
        (lambda line: line.update(why_not=None), "TypeError: a value is of the wrong type)"),
        (lambda line: line.update(index="1"), "TypeError: a value is of the wrong type)"),
        (lambda line: line.update(index=2), "ValueError: index must be 0..1, got 2)"),
        (lambda line: line.update(index=-1), "ValueError: index must be 0..1, got -1)"),
    ],
)
def test_a_journals_line_that_is_no_answer_is_named(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, why: str
) -> None:
    with serving({}) as url:
        assert call(tmp_path, target, url, ["w1"], ["w2"]) == 0
        made_with, first, second = map(json.loads, journal(tmp_path).read_text().splitlines())
        change(second)
        odd = "".join(json.dumps(line) + "\n" for line in (made_with, first, second))
        journal(tmp_path).write_text(odd)
        (tmp_path / "out").rename(tmp_path / "before")
        capsys.readouterr()
        assert call(tmp_path, target, url, ["w1"], ["w2"]) == 3
    err = capsys.readouterr().err
    assert err.startswith(
        f"error: {journal(tmp_path)} must hold answers of `python -m trainer.prepare`, line 3 does not ({why}"
    )
    assert err.count("\n") == 1
    assert journal(tmp_path).read_text() == odd


@pytest.mark.parametrize(
    ("before", "mend"),
    [([], "remove the file to begin anew"), (['{"made_with": {}}'], "remove that line, or the file to begin anew")],
)
@pytest.mark.parametrize("odd", ["\0" * 9998, "[]"])
def test_what_is_odd_in_a_journal_is_told_briefly_and_the_advice_leaves_one_that_begins_right(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: list[str], mend: str, odd: str
) -> None:
    journal(tmp_path).write_text("\n".join([*before, odd, ""]))
    assert call(tmp_path, target, "http://127.0.0.1:1/v1", ["w1"]) == 3
    err = capsys.readouterr().err
    assert f", line {1 + len(before)} does not (" in err
    assert err.endswith(f"); {mend}\n")
    assert len(err) < 300 + len(str(tmp_path))


def test_a_journal_of_when_chats_with_useless_turns_were_dropped_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It numbers the conversations behind them differently."""
    with serving({}) as url:
        assert call(tmp_path, target, url, ["w1"], ["w2"]) == 0
        made_with = json.loads(journal(tmp_path).read_text().splitlines()[0])
        assert "left_out" not in made_with["made_with"], "a journal of other chats stays good"
        given = [{"role": "system", "content": ""}, {"role": "user", "content": "w1"}]
        (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": given}) + "\n")
        command = ["--input", str(tmp_path / "chats.jsonl"), "--output", str(tmp_path / "new"), "--target", str(target)]
        command += ["--regenerate", "--server", url, "--max-tokens", "48", "--held-out", "0"]
        assert prepare.main(command) == 0
        lines = (tmp_path / "new.regenerated.jsonl").read_text().splitlines()
        before = json.loads(lines[0])
        del before["made_with"]["left_out"]
        (tmp_path / "new.regenerated.jsonl").write_text("\n".join([json.dumps(before), *lines[1:]]) + "\n")
        (tmp_path / "new").rename(tmp_path / "newer")
        assert prepare.main(command) == 3
    assert "made otherwise: left_out was None, is {'a system turn without text': 1}; remove" in capsys.readouterr().err


def test_a_reply_that_is_nested_too_deeply_is_one_sentence(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        json, "dumps", lambda value, **_: "[" * 100_000 if "choices" in value else json.JSONEncoder().encode(value)
    )
    with serving({}) as url:
        assert call(tmp_path, target, url, ["w1"]) == 3
    err = capsys.readouterr().err
    assert "the answer must be a chat completion: RecursionError(" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("template", "cause"), [("{{ 1 // 0 }}", "integer division"), ("{{ messages[0].content + 5 }}", "can only concatenate")]
)
def test_a_template_that_fails_refuses_the_question(target: Path, template: str, cause: str) -> None:
    model = load_causal_lm(TargetConfig(path=str(target), dtype="float32"), Path(), torch.device("cpu"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = template
    greedy = Sampling(0.0, torch.Generator())
    answers = LocalAnswers(model, tokenizer, {1}, greedy, num_rows=2, max_tokens=9, max_new_tokens=9)
    answers.submit(4, [{"role": "user", "content": "w1"}])
    (answer,) = answers.collect()
    assert (answer.key, answer.text, answer.why_not) == (4, None, "the chat template refuses it")
    assert answer.cause.startswith(cause)


def test_the_cause_of_a_template_that_refuses_all_questions_is_told_of_a_later_start_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny.make_with_template(tmp_path)
    (target / "chat_template.jinja").write_text("{{ raise_exception('no ' ~ messages[0].content) }}")
    (tmp_path / "chats.jsonl").write_text('"w1"\n"w2"\n')
    given = ["--input", str(tmp_path / "chats.jsonl"), "--output", str(tmp_path / "out"), "--target", str(target)]
    for _ in range(2):
        assert prepare.main([*given, "--regenerate", "--dtype", "float32"]) == 3
        err = capsys.readouterr().err
        assert err.endswith("no conversation is left to train on (2 dropped: the chat template refuses it: no w1)\n")
