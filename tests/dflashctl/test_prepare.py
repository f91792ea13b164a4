"""`dflashctl prepare`: an experiment's data are made on its host, as a run, by what its section `prepare` says."""

import datetime
import fcntl
import http.server
import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from trainer.dataset import open_shards

TEMPLATE = """\
{% for m in messages %}{% if m.role == 'assistant' %} w8 {{ m.content }} </s>\
{% else %} w7 {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} w8 {% endif %}"""


class Server:
    """Answers every question with its words in reverse, until it is told to hang."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.numbers = itertools.count(1)
        """Of requests: who comes with which is decided once, however many come together."""
        self.hangs_after = 10**9
        self.go_on = threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                question = request["messages"][-1]["content"]
                server.asked.append(question)
                if next(server.numbers) > server.hangs_after:
                    server.go_on.wait(120)
                message = {"role": "assistant", "content": " ".join(question.split()[::-1])}
                answer = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.handle_error = lambda *_: None  # type: ignore[method-assign]  # who asked was killed
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, daemon=True)
    thread.start()
    yield made
    made.go_on.set()
    made.http.shutdown()
    made.http.server_close()
    thread.join(30)


@pytest.fixture
def far(bench, tiny_run):
    """Experiment `tiny`, whose target and chats lie under the host's root, and the real trainer."""
    bench.root.mkdir()
    shutil.copytree(tiny_run.root / "target", bench.root / "target")
    (bench.root / "target/chat_template.jinja").write_text(TEMPLATE)
    turns = [[{"role": "user", "content": f"w{i} w{i + 1}"}, {"role": "assistant", "content": "w0 w0"}] for i in range(9, 49)]
    (bench.root / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    config = tiny_run.config(data={"path": "made/data"}) | {"prepare": {"input": ["chats.jsonl"], "held_out": 0.2}}
    del config["run"]["root"]
    (bench.folder / "experiments/tiny.yaml").write_text(json.dumps({"hypothesis": "it learns", "trainer": config}))
    del bench.env["DFLASHCTL_TRAINER"]
    return bench


def events(bench, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (bench.run_folder(run) / "events.jsonl").read_text().splitlines()]


def num_documents(bench) -> int:
    return sum(len(open_shards(bench.root / "made/data", split)) for split in ("train", "held_out"))


def test_the_data_of_an_experiment_are_made_on_its_host_as_a_run(far) -> None:
    done = far("prepare", "tiny", "--follow", timeout=300)
    assert done.exit_code == 0, done.stderr
    assert "kept 40 of 40 conversations: " in done.stdout
    assert num_documents(far) == 40
    assert [event["event"] for event in events(far, "tiny-prepare-1")] == ["started", "finished"]
    assert sum(events(far, "tiny-prepare-1")[-1]["kept"].values()) == 40
    state = far("status", "tiny-prepare-1", "--json").document
    assert (state["state"], state["exit_code"], state["last_event"]) == ("exited", 0, "finished")
    again = far("prepare", "tiny")
    assert (again.exit_code, again.stdout) == (3, "")
    assert f"{far.root}/made/data exists already" in again.stderr
    assert not far.run_folder("tiny-prepare-2").exists()


def test_the_target_answers_where_it_lies(far) -> None:
    sets = ("--set", "prepare.regenerate=true", "--set", "prepare.max_new_tokens=12", "--set", "prepare.temperature=0.7")
    done = far("prepare", "tiny", *sets, "--json", "--follow", timeout=300)
    assert done.exit_code == 0, done.stderr
    assert (done.document["run"], done.document["tag"], done.document["last_event"]) == (
        "tiny-prepare-1",
        "tiny-prepare",
        "finished",
    )
    started, *progress, finished = events(far, "tiny-prepare-1")
    assert (started["event"], started["output"]) == ("started", "made/data")
    assert {event["event"] for event in progress} == {"progress"}
    assert (progress[-1]["done"], progress[-1]["total"], progress[-1]["remaining_s"]) == (40, 40, 0)
    assert sum(finished["kept"].values()) + sum(finished["dropped"].values()) == 40
    assert num_documents(far) == sum(finished["kept"].values())
    about = json.loads((far.root / "made/data/meta.json").read_text())
    assert (about["regenerated"]["temperature"], about["max_tokens"]) == (0.7, 24)


def test_one_that_was_killed_goes_on_by_the_same_command(far, server: Server) -> None:
    server.hangs_after = 11
    how = [f"prepare.server={server.url}", "prepare.server_model=it", "prepare.regenerate=true", "prepare.rows=2"]
    command = ("prepare", "tiny", *(word for text in how for word in ("--set", text)))
    assert far(*command).exit_code == 0
    far.until(lambda: len(server.asked) >= 13, 240)  # torch is imported first
    journal = far.root / "made/data.regenerated.jsonl"
    far.until(lambda: len(journal.read_bytes().splitlines()) >= 11)
    assert " of 40 conversations answered, " in far("status", "tiny-prepare-1").stdout
    (trainer,) = far.marked("tiny-prepare-1")
    os.kill(trainer, signal.SIGKILL)
    far.until(lambda: far("status", "--json").document["state"] == "killed")
    assert not (far.root / "made/data").exists()
    answered = {json.loads(line)["messages"][0]["content"] for line in journal.read_text().splitlines()[1:]}
    server.hangs_after = 10**9
    server.go_on.set()
    server.asked.clear()
    assert far(*command, "--follow", timeout=300).exit_code == 0
    assert not set(server.asked) & answered
    assert num_documents(far) == 40
    assert events(far, "tiny-prepare-2")[-1]["event"] == "finished"
    assert "last event finished" in far("status").stdout


def test_a_second_one_at_once_is_refused_before_it_starts(far) -> None:
    (far.root / "made").mkdir()
    with (far.root / "made/data.regenerated.jsonl").open("ab") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        done = far("prepare", "tiny", "--set", "prepare.regenerate=true")
    assert (done.exit_code, done.stdout) == (3, "")
    assert f"{far.root}/made/data.regenerated.jsonl is being written by another preparation" in done.stderr
    assert not (far.root / "runs").exists()


@pytest.mark.parametrize(("overdue", "age_s"), [(False, 0), (True, 0), (False, 1000)], ids=["well", "overdue", "old"])
def test_how_fast_it_is_and_how_long_it_will_take_is_said_of_one_that_moves(bench, overdue: bool, age_s: int) -> None:
    when = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_s)).isoformat(timespec="milliseconds")
    said = [
        {"event": "started"},
        {"event": "progress", "time": when.replace("+00:00", "Z"), "done": 1, "total": 40}
        | {"conversations_per_s": 15.0, "tokens_per_s": 29.0, "remaining_s": 66.0},
        {"event": "heartbeat", "idle_s": 1.0, "overdue": overdue},
    ]
    lines = "".join(json.dumps(event) + "\n" for event in said)
    bench.trainer(f"import pathlib, time; pathlib.Path('events.jsonl').write_text({lines!r}); time.sleep(600)", "prepare.py")
    bench.root.mkdir()
    (bench.root / "chats.jsonl").touch()
    assert bench("prepare", "quick", "--set", "data.path=data/x", "--set", "prepare.input=[chats.jsonl]").exit_code == 0
    text = bench("status", "quick-prepare-1").stdout
    assert ("1 of 40 conversations answered, 15/s, 29 tokens/s, 66 s left\n" in text) is not (overdue or age_s > 0)
    assert "\n1 of 40 conversations answered" in text
    assert ("running, stalled: " in text) is overdue
    bench("stop", "quick-prepare-1")
    assert "\n1 of 40 conversations answered\n" in bench("status", "quick-prepare-1").stdout


def test_what_goes_on_with_a_preparation_is_named_and_more_than_one_gpu_refused(bench) -> None:
    bench.trainer("import sys; sys.exit()", "prepare.py")
    bench.root.mkdir()
    (bench.root / "chats.jsonl").touch()
    assert bench("prepare", "quick", "--set", "data.path=data/x", "--set", "prepare.input=[chats.jsonl]").exit_code == 0
    resumed = bench("launch", "--resume", "quick-prepare-1")
    assert resumed.exit_code == 2
    assert "local:quick-prepare-1 made data and is no training: " in resumed.stderr
    assert "hint: dflashctl prepare quick\n" in resumed.stderr
    two = bench("prepare", "quick", "--gpus", "0,1")
    assert (two.exit_code, "error: prepare uses one GPU at most, got --gpus 0,1\n" in two.stderr) == (2, True)


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["prepare.input=[chat.jsonl]"], "prepare.input must name files, got {root}/chat.jsonl, which is none"),
        (["prepare.input=[]"], "tiny: prepare.input must name at least one JSONL file, got []"),
        (["prepare.inputs=[chats.jsonl]"], "prepare: unknown key 'inputs'; did you mean 'input'?"),
        (["prepare.held_out=1"], "prepare.held_out must be 0..1, 1 excluded, got 1.0"),
        (["prepare.rows=8"], "tiny: prepare.rows needs prepare.regenerate: true, got 8 without it"),
        (
            ["prepare.regenerate=true", "prepare.server=myhost"],
            "prepare.server must be a URL such as http://host:8000/v1, got 'myhost'",
        ),
    ],
)
def test_what_cannot_be_prepared_is_one_sentence_and_no_run(far, sets: list[str], sentence: str) -> None:
    done = far("prepare", "tiny", *(word for text in sets for word in ("--set", text)))
    assert (done.exit_code, done.stdout) == (3, "")
    assert sentence.format(root=far.root) in done.stderr
    assert not (far.root / "runs").exists()


def test_a_death_in_the_start_up_window_is_told(bench) -> None:
    bench.trainer("import sys; sys.exit('error: no chat template')", "prepare.py")
    (bench.root / "data").mkdir(parents=True)
    (bench.root / "data/chats.jsonl").touch()
    done = bench("prepare", "quick", "--set", "data.path=data/x", "--set", "prepare.input=[data/chats.jsonl]")
    assert done.exit_code == 9
    assert "no chat template" in done.stderr


def test_it_takes_one_gpu_if_the_target_answers_on_one_and_none_if_it_does_not(bench) -> None:
    bench.nvidia_smi(
        f"""
        case "$1" in --query-compute-apps=*) exit 0;; esac
        echo "index, uuid, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%]"
        echo "0, GPU-prep0-{os.getpid()}, NVIDIA H200, 0, 143771, 0"
        echo "1, GPU-prep1-{os.getpid()}, NVIDIA H200, 0, 143771, 0"
        """
    )
    path = bench.experiment("cuda", "cuda:0")
    path.write_text(path.read_text().replace("path: /", "path: data/x") + "  prepare: {input: [chats.jsonl]}\ngpus: [1, 0]\n")
    bench.root.mkdir()
    (bench.root / "chats.jsonl").touch()
    bench.trainer("import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1:])", "prepare.py")
    for more, gpus in (
        (["prepare.regenerate=true"], f"GPU-prep1-{os.getpid()}"),
        (["prepare.regenerate=true", "prepare.server=http://localhost:1/v1"], ""),
        ([], ""),
    ):
        done = bench("prepare", "cuda", *(word for text in more for word in ("--set", text)), "--json")
        assert done.exit_code == 0, done.stderr
        folder = bench.run_folder(done.document["run"])
        assert (folder / "train.log").read_text() == f"{gpus} ['{folder}/config.json']\n"
