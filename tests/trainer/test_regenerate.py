"""The target writes the answers: as it would alone, whatever the batch; killed, it goes on; a server does the same."""

import contextlib
import fcntl
import http.server
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
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
from trainer.decoding import Decoder, Sampling, stop_token_ids
from trainer.errors import DataError
from trainer.model.target import load_causal_lm

QUESTIONS = [["w1 w2 w3"], ["w4", "w5 w6"], ["w9 w10 w11 w12"], ["w13"], ["w14 w15"], ["w16", "w17", "w18"]] + [
    [f"w{20 + i} w{30 + i}"] for i in range(12)
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a chat template; its answers end soon, or not at all."""
    return tiny.make_with_template(tmp_path_factory.mktemp("target"))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    lines = []
    for turns in QUESTIONS:
        messages = [m for turn in turns for m in ({"role": "user", "content": turn}, {"role": "assistant", "content": "w0"})]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join([*lines, json.dumps("w50 w51"), json.dumps({"prompt": "w52"})]) + "\n")
    return path


def call(chats: Path, target: Path, *more: str, name: str = "out") -> int:
    given = ["--input", str(chats), "--output", str(chats.parent / name), "--target", str(target), "--regenerate"]
    return prepare.main([*given, "--dtype", "float32", "--max-tokens", "48", "--max-new-tokens", "20", *more])


def journal(chats: Path, name: str = "out") -> dict[int, dict[str, Any]]:
    lines = map(json.loads, (chats.parent / f"{name}.regenerated.jsonl").read_text().splitlines()[1:])
    return {line["index"]: line for line in lines}


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_greedy_answers_are_those_that_the_target_gives_alone(
    chats: Path, target: Path, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(chats, target, "--rows", str(rows), "--held-out", "0") == 0
    captured = capsys.readouterr()
    model = load_causal_lm(TargetConfig(path=str(target), dtype="float32"), Path(), torch.device("cpu"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    greedy, stop_ids = Sampling(0.0, torch.Generator()), stop_token_ids(model, tokenizer)
    decoder = Decoder(model, 48)
    expected, broken_off = {}, {}
    for key, turns in enumerate([*QUESTIONS, ["w50 w51"], ["w52"]]):
        messages: list[dict[str, str]] = []
        for turn in turns:
            asked = [*messages, {"role": "user", "content": turn}]
            prompt = tokenizer(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))["input_ids"]
            answer = decoder.decode(prompt, min(20, 48 - len(prompt)), stop_ids, greedy)
            text = tokenizer.decode(answer.tokens[:-1], skip_special_tokens=True).strip()
            if not answer.ended:
                broken_off[key] = " " + tokenizer.decode(answer.tokens, skip_special_tokens=True)
                messages = asked
            if not (answer.ended and text):
                break
            messages = [*asked, {"role": "assistant", "content": text}]
        expected[key] = messages
    assert {key: line["messages"] for key, line in journal(chats).items()} == expected
    assert {key: line["unfinished"] for key, line in journal(chats).items() if "unfinished" in line} == broken_off
    kept = sum(bool(messages) for messages in expected.values())
    assert 3 < len(broken_off) < kept - 3  # both kinds are there
    shards = open_shards(chats.parent / "out", "train")
    assert captured.out.startswith(f"kept {len(shards)} of {len(expected)} conversations")
    assert f"\n{len(broken_off)} end with an answer that was broken off\n" in captured.out
    ends = [(tokens[-1], loss_mask[-1]) for tokens, loss_mask in map(shards.document, range(len(shards)))]
    assert sum(token not in stop_ids for token, _ in ends) == len(broken_off)
    assert all(is_response for _, is_response in ends)
    assert f"answered {len(expected)} of {len(expected)} conversations, " in captured.err
    meta = json.loads((chats.parent / "out" / "meta.json").read_text())
    assert meta["regenerated"]["max_new_tokens"] == 20


def test_what_is_left_of_a_journal_is_gone_on_from(chats: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(chats, target, "--rows", "4") == 0
    whole = journal(chats)
    path = chats.parent / "out.regenerated.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.with_name("again.regenerated.jsonl").write_bytes(b"".join(lines[:8]) + lines[8][:-9])
    capsys.readouterr()
    assert call(chats, target, "--rows", "4", name="again") == 0
    assert journal(chats, "again") == whole
    for split in ("tokens", "offsets", "loss_mask"):
        one, two = (chats.parent / name / "train" / f"{split}.bin" for name in ("out", "again"))
        assert one.read_bytes() == two.read_bytes()


def test_a_journal_that_was_torn_in_its_first_line_begins_anew(chats: Path, target: Path) -> None:
    path = chats.parent / "out.regenerated.jsonl"
    path.write_text('{"made_with": {"inp')
    assert call(chats, target) == 0
    assert "made_with" in json.loads(path.read_text().splitlines()[0])
    assert len(journal(chats)) == 20


def test_a_journal_that_was_made_otherwise_is_refused(chats: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(chats, target) == 0
    (chats.parent / "other.regenerated.jsonl").write_bytes((chats.parent / "out.regenerated.jsonl").read_bytes())
    capsys.readouterr()
    assert call(chats, target, "--temperature", "0.5", name="other") == 3
    assert "made otherwise: temperature was 0.0, is 0.5; remove it to begin anew" in capsys.readouterr().err
    assert call(chats, target, "--dtype", "bfloat16", name="other") == 3
    assert "made otherwise: answers was 'here, in float32', is 'here, in bfloat16'" in capsys.readouterr().err
    assert call(chats, target, "--server", "http://127.0.0.1:1/v1", name="other") == 3
    assert "made otherwise: answers was 'here, in float32', is 'from a server'" in capsys.readouterr().err
    (chats.parent / "foreign.regenerated.jsonl").write_text('{"messages": []}\n')
    assert call(chats, target, name="foreign") == 3
    assert "must hold answers of `python -m trainer.prepare`" in capsys.readouterr().err
    assert (chats.parent / "foreign.regenerated.jsonl").read_text() == '{"messages": []}\n'
    assert not (chats.parent / "foreign").exists()


def test_two_at_once_do_not_write_one_journal(chats: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (chats.parent / "out.regenerated.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert call(chats, target) == 3
    assert "is being written by another `python -m trainer.prepare`" in capsys.readouterr().err
    assert call(chats, target) == 0


def test_sampled_answers_differ_from_seed_to_seed_and_not_from_time_to_time(chats: Path, target: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert call(chats, target, "--temperature", "1", "--seed", seed, name=name) == 0
    assert journal(chats, "a") == journal(chats, "b") != journal(chats, "c")


def test_options_that_do_nothing_are_refused(chats: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--input", str(chats), "--output", str(chats.parent / "out"), "--target", str(target)]
    for option in (("--temperature", "1"), ("--dtype", "float32"), ("--dtype", "bfloat16")):
        with pytest.raises(SystemExit, match="2"):
            prepare.main([*given, *option])
        assert "need --regenerate" in capsys.readouterr().err


@pytest.mark.parametrize("server", ["myhost/v1", "myhost:8000/v1", "ftp://myhost/v1", "http:///v1", "http://myhost:port/v1"])
def test_a_server_is_a_url(chats: Path, target: Path, capsys: pytest.CaptureFixture[str], server: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        call(chats, target, "--server", server)
    assert f"--server must be a URL such as http://host:8000/v1, got {server}" in capsys.readouterr().err


def test_what_is_sampled_after_a_kill_is_not_what_was_sampled_before(chats: Path, target: Path) -> None:
    chats.write_text((json.dumps("w1 w2 w3") + "\n") * 8)
    given = ["--temperature", "1", "--rows", "1"]
    assert call(chats, target, *given) == 0
    path = chats.parent / "out.regenerated.jsonl"
    before = [line["messages"] for line in journal(chats).values()]
    path.with_name("again.regenerated.jsonl").write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    assert call(chats, target, *given, name="again") == 0
    kept, *new = (line["messages"] for line in journal(chats, "again").values())
    assert kept == before[0]
    assert any(new)
    assert new != before[:-1], "one draw for two questions"


def test_a_prompt_without_room_and_a_template_that_refuses_are_no_questions(target: Path) -> None:
    model = load_causal_lm(TargetConfig(path=str(target), dtype="float32"), Path(), torch.device("cpu"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    greedy = Sampling(0.0, torch.Generator())
    answers = LocalAnswers(model, tokenizer, {1}, greedy, num_rows=2, max_tokens=6, max_new_tokens=9)
    answers.submit(3, [{"role": "user", "content": "w1 w2 w3 w4"}])
    (answer,) = answers.collect()
    assert (answer.key, answer.text, answer.why_not) == (3, None, "its prompt leaves no room within 6 tokens")
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    answers.submit(4, [{"role": "user", "content": "w1"}])
    (answer,) = answers.collect()
    assert (answer.key, answer.why_not) == (4, "the chat template refuses it")
    tokenizer.chat_template = "{{ '' }}"
    answers.submit(5, [{"role": "user", "content": "w1"}])
    (answer,) = answers.collect()
    assert (answer.key, answer.why_not) == (5, "its prompt has no token")
    assert answers.num_free == 2


def test_a_token_that_the_target_does_not_know_is_one_sentence(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny.make_with_template(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens([f"v{i}" for i in range(8)])  # ids 60..67 of 64 rows
    tokenizer.save_pretrained(target)
    chats.write_text('"w1 v3"\n"w1 v4"\n')
    assert call(chats, target) == 3
    assert capsys.readouterr().err.startswith("error: question 2 holds token id 64, the target's vocabulary has 64")
    assert not list(tmp_path.glob("*out*"))


def ask_all(answers: LocalAnswers, questions: list[str]) -> dict[int, str | None]:
    told: dict[int, str | None] = {}
    waiting = list(enumerate(questions))
    while len(told) < len(questions):
        while waiting and answers.num_free:
            key, question = waiting.pop(0)
            answers.submit(key, [{"role": "user", "content": question}])
        told |= {answer.key: answer.text for answer in answers.collect()}
    return told


@pytest.mark.parametrize("window", [None, 6])
@torch.inference_mode()
def test_answers_of_any_length_are_hugging_faces_own(target: Path, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("_KEY_STEP", 16), ("_PREFILL_TOKENS", 20), ("_REFILL_STEPS", 3)):
        monkeypatch.setattr(f"trainer.answers.{name}", small)
    torch.manual_seed(1)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    limits = {"num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 64, "sliding_window": window}
    model = transformers.AutoModelForCausalLM.from_config(transformers.MistralConfig(**shape, **limits), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    questions = [" ".join(f"w{(7 * i + j) % 50}" for j in range(1 + 5 * i % 39)) for i in range(20)]
    told = ask_all(
        LocalAnswers(model, tokenizer, {1}, Sampling(0.0, torch.Generator()), num_rows=3, max_tokens=99, max_new_tokens=20),
        questions,
    )
    ended = 0
    for key, question in enumerate(questions):
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
        most = min(20, 64 - len(prompt))  # beyond its positions it is never asked
        out = model.generate(torch.tensor([prompt]), max_new_tokens=most, do_sample=False, eos_token_id=1, pad_token_id=0)
        tokens = out[0, len(prompt) :].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
        has_ended = tokens[-1] == 1
        assert told[key] == ((text if has_ended else f" {text}") if text else None)
        ended += has_ended
    assert 0 < ended < len(questions)  # else this would prove little


def test_rows_that_do_not_fit_are_one_sentence(chats: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_causal_lm(TargetConfig(path=str(target), dtype="float32"), Path(), torch.device("cpu"))
    with pytest.raises(DataError, match=r"values of 1000000000 rows of 64 tokens need .* GiB, which cpu does not have"):
        LocalAnswers(model, None, {1}, Sampling(0.0, torch.Generator()), num_rows=10**9, max_tokens=99, max_new_tokens=9)
    assert call(chats, target, "--rows", str(10**9)) == 0  # there are not so many questions
    assert capsys.readouterr().out.startswith("kept ")


class Server(http.server.ThreadingHTTPServer):
    """An OpenAI-compatible server that answers with the question's words backwards, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, reply: Callable[[list[dict[str, str]]], tuple[int, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.asked: list[list[str]] = []
        self.numbers = itertools.count(1)
        """Of requests: who comes with which is decided once, however many come together."""
        self.hangs_after = 10**9
        self.go_on = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        assert (request["model"], request["max_tokens"]) == ("the-target", 20)
        self.server.asked.append([message["content"] for message in request["messages"]])
        if next(self.server.numbers) > self.server.hangs_after:
            self.server.go_on.wait(60)
        status, reply = self.server.reply(request["messages"])
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # whoever asked may be dead
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def backwards(messages: list[dict[str, str]], finish: str = "stop") -> tuple[int, Any]:
    text = " ".join(messages[-1]["content"].split()[::-1])
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return 200, {"choices": [choice], "usage": {"completion_tokens": 3}}


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    running = []

    def start(reply: Callable[[list[dict[str, str]]], tuple[int, Any]] = backwards) -> Server:
        server = Server(reply)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_a_server_answers_too_and_what_it_refuses_or_breaks_off_is_counted(
    chats: Path, target: Path, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(messages: list[dict[str, str]]) -> tuple[int, Any]:
        if messages[-1]["content"] == "w13":
            return 400, {}
        return backwards(messages, "length" if messages[-1]["content"] == "w17" else "stop")

    server = serve(reply)
    assert call(chats, target, "--server", server.url, "--server-model", "the-target", "--held-out", "0") == 0
    told = journal(chats)
    assert [m["content"] for m in told[1]["messages"]] == ["w4", "w4", "w5 w6", "w6 w5"]
    assert [m["content"] for m in told[5]["messages"]] == ["w16", "w16", "w17"]
    assert told[5]["unfinished"] == "w17", "it was broken off, and nothing is asked after it"
    assert told[3]["messages"] == []
    out = capsys.readouterr().out
    assert "kept 19 of 20 conversations" in out
    assert "  1  the server refuses it (HTTP 400)\n" in out
    assert ["w4", "w4", "w5 w6"] in server.asked


def test_an_answer_that_was_broken_off_ends_where_a_document_must(
    chats: Path, target: Path, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    chats.write_text(json.dumps("w1 w2") + "\n" + json.dumps("w3") + "\n" + json.dumps("w1 " * 60) + "\n")

    def reply(messages: list[dict[str, str]]) -> tuple[int, Any]:
        text = {"w1 w2": "w5 " * 99, "w3": " w6 w7\ufffd"}.get(messages[-1]["content"], "w8")
        return 200, {"choices": [{"message": {"content": text}, "finish_reason": "length"}]}

    assert call(chats, target, "--server", serve(reply).url, "--server-model", "the-target", "--held-out", "0") == 0
    out = capsys.readouterr().out
    assert out.startswith("kept 2 of 3 conversations")
    assert "\n2 end with an answer that was broken off\n" in out
    assert "  1  its first answer ends after 48 tokens\n" in out
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    shards = open_shards(chats.parent / "out", "train")
    texts = [tokenizer.decode(tokens) for tokens, _ in map(shards.document, range(len(shards)))]
    assert texts == ["w7 w1 w2 w8" + " w5" * 44, "w7 w3 w8 w6 w7"]


THINKING = "<think>\nw1\n</think>\n\nw2"
ODD_ANSWERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "w1 w2 w3": ({"content": "w2", "reasoning": " w1\n"}, "stop", THINKING),
    "w9 w10 w11 w12": ({"content": "w2", "reasoning_content": "w1", "reasoning": None}, "stop", THINKING),
    "w13": ({"content": None, "reasoning": "w1"}, "stop", "its answer has no text"),
    "w14 w15": ({"content": None}, "tool_calls", "its answer ends with finish_reason 'tool_calls'"),
    "w50 w51": ({"content": "w1", "reasoning": "w3"}, "length", "its answer does not end within 20 tokens"),
    "w52": ({}, "stop", "its answer has no text"),
}
"""Message, finish_reason and what becomes of it by question."""


@pytest.mark.parametrize("usage", [{"completion_tokens": None}, [3]])
def test_thoughts_are_kept_and_an_answer_without_a_text_is_counted_by_its_reason(
    chats: Path, target: Path, serve: Callable[..., Server], usage: Any
) -> None:
    def reply(messages: list[dict[str, str]]) -> tuple[int, Any]:
        message, finish, _ = ODD_ANSWERS.get(messages[-1]["content"], ({"content": "w2"}, "stop", ""))
        return 200, {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}

    server = serve(reply)
    assert call(chats, target, "--server", server.url, "--server-model", "the-target", "--held-out", "0") == 0
    lines = journal(chats)
    questions = [*(turns[0] for turns in QUESTIONS), "w50 w51", "w52"]
    for question, (_, _, expected) in ODD_ANSWERS.items():
        line = lines[questions.index(question)]
        assert (line["messages"][-1]["content"] if line["messages"] else line["why_not"]) == expected
    assert sum(not line["messages"] for line in lines.values()) == 4


@pytest.mark.parametrize("rows", ["1", "4"])
def test_a_question_at_which_a_server_fails_is_dropped_and_a_server_that_only_fails_ends_it(
    chats: Path, target: Path, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str], rows: str
) -> None:
    server = serve(lambda _messages: (500, {}))
    given = ["--rows", rows, "--server", server.url, "--server-model", "the-target", "--held-out", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.answers._PATIENCE_S", (0.0,))
        assert call(chats, target, *given) == 3
        assert "cannot be asked: HTTP Error 500" in capsys.readouterr().err
        assert not list(chats.parent.glob("*out*"))
        server.reply = lambda messages: (500, {}) if messages[-1]["content"] in ("w1 w2 w3", "w52") else backwards(messages)
        assert call(chats, target, *given) == 0
        assert "  2  the server fails at it (HTTP 500)\n" in capsys.readouterr().out
        assert journal(chats)[19]["messages"] == []
        server.reply = lambda _messages: (500, {})
        lines = (chats.parent / "out.regenerated.jsonl").read_bytes().splitlines(keepends=True)
        (chats.parent / "late.regenerated.jsonl").write_bytes(b"".join(lines[:-1]))  # nothing is left but one at which it fails
        assert call(chats, target, *given, name="late") == 0
        patch.setattr("trainer.answers._FAILURES", 3)  # by now it is the server that fails
        (chats.parent / "cut.regenerated.jsonl").write_bytes(b"".join(lines[:9]))
        assert call(chats, target, *given, name="cut") == 3
    assert len(journal(chats, "cut")) == 8


@contextlib.contextmanager
def started(chats: Path, target: Path, server: Server) -> Iterator[subprocess.Popen[str]]:
    """The command, once the server has been asked eleven times; it is waited for."""
    command = [sys.executable, "-m", "trainer.prepare", "--input", chats, "--output", chats.parent / "out", "--target", target]
    command += ["--regenerate", "--max-tokens", "48", "--max-new-tokens", "20", "--rows", "2", "--held-out", "0"]
    command += ["--server", server.url, "--server-model", "the-target"]
    # a test run in the background of a script inherits an ignored SIGINT, and so would its children
    words = ["env", "--default-signal=INT", *map(str, command)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            moment = threading.Event()
            while len(server.asked) < 11:
                assert process.poll() is None, process.communicate()[1]
                moment.wait(0.05)
            yield process
        finally:
            if process.poll() is None and sys.exc_info()[0]:
                process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_it_leaves_what_was_answered_and_nothing_else(
    chats: Path, target: Path, serve: Callable[..., Server], number: int, code: int
) -> None:
    server = serve(backwards)
    server.hangs_after = 9
    with started(chats, target, server) as process:
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    server.go_on.set()
    assert process.returncode == code
    assert "Traceback" not in err
    assert len(journal(chats)) >= 5
    assert sorted(path.name for path in chats.parent.iterdir() if "out" in path.name) == ["out.regenerated.jsonl"]


def test_killed_it_goes_on_and_asks_nothing_twice_that_was_answered(
    chats: Path, target: Path, serve: Callable[..., Server]
) -> None:
    server = serve(backwards)
    server.hangs_after = 9
    with started(chats, target, server) as process:
        os.kill(process.pid, signal.SIGKILL)
    server.go_on.set()
    answered = {tuple(line["messages"][0]["content"].split()) for line in journal(chats).values()}
    assert len(answered) >= 5
    assert not (chats.parent / "out").exists()
    server.asked.clear()
    assert call(chats, target, "--rows", "2", "--held-out", "0", "--server", server.url, "--server-model", "the-target") == 0
    assert not {tuple(asked[0].split()) for asked in server.asked} & answered
    assert len(open_shards(chats.parent / "out", "train")) == len(journal(chats)) == 20


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (lambda _m: (404, {}), "cannot be asked: HTTP Error 404"),
        (lambda _m: (200, {"choices": []}), "the answer must be a chat completion"),
        (lambda _m: (200, {"choices": [{"message": "w1", "finish_reason": "stop"}]}), "the answer must be a chat completion"),
        (lambda _m: (200, ["w1"]), "the answer must be a chat completion"),
    ],
)
def test_a_server_that_is_none_is_one_sentence_and_leaves_what_was_answered(
    chats: Path, target: Path, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str], reply: Any, sentence: str
) -> None:
    server = serve(reply)
    assert call(chats, target, "--server", server.url, "--server-model", "the-target") == 3
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1
    assert not list(chats.parent.glob("*out*"))
