"""What a host sends is untrusted, and what this machine remembers survives a full disk and two writers."""

import json
import subprocess
import sys

import pytest

EVIL = "\x1b]0;owned\x07\x1b[31mred\x9b2J"


@pytest.fixture
def hostile(bench):
    """A host whose interpreter answers what the file `answer` holds, whatever it was asked."""
    python = bench.folder / "bin/python"
    python.write_text(f"#!/bin/sh\ncat >/dev/null &\ncat '{bench.folder}/answer'\n")
    python.chmod(0o755)
    bench.hosts(f"hosts: {{local: {{transport: local, root: .dflash, python: '{python}'}}}}")

    def answer(document) -> None:
        (bench.folder / "answer").write_text((document if isinstance(document, str) else json.dumps(document)) + "\n")

    bench.answer = answer
    return bench


def test_control_sequences_of_a_host_drive_no_terminal(hostile) -> None:
    state = {"state": EVIL, "exit_code": None}
    record = {"run": f"quick{EVIL}-1", "tag": EVIL, "launch_id": "ab", "launched_at": EVIL, "hypothesis": EVIL}
    hostile.answer({"result": {"runs": [{"record": record, "state": state}]}})
    for command in (("runs", "--refresh"), ("runs",)):
        done = hostile(*command)
        assert "red" in done.stdout
        assert not set("\x1b\x07\x9b") & set(done.stdout + done.stderr)
    hostile.answer({"fault": {"code": "environment", "message": EVIL, "hint": EVIL, "details": {}}})
    done = hostile("deploy")
    assert (done.exit_code, "red" in done.stderr) == (8, True)
    assert not set("\x1b\x07\x9b") & set(done.stdout + done.stderr)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "no json",
        "[1, 2]",
        '"text"',
        '{"result": {"runs": 5}}',
        '{"result": null}',
        '{"fault": 7}',
        "[" * 100_000,
        '{"x": 1e999',
    ],
    ids=lambda text: text[:20],
)
def test_an_answer_that_makes_no_sense_is_one_sentence(hostile, answer: str) -> None:
    hostile.answer(answer)
    done = hostile("deploy", "--json")
    assert done.exit_code == 8
    assert done.document["error"]["message"]


def test_a_run_with_a_path_for_a_name_reaches_no_file(bench) -> None:
    """A history that somebody else has written."""
    state = bench.folder / "state"
    state.mkdir()
    place = bench("runs", "--json")  # so that the host's place is known
    assert place.exit_code == 0
    assert bench("launch", "--tag", "quick", "--startup-seconds", "30").exit_code == 0
    line = json.loads((state / "history.jsonl").read_text().splitlines()[-1])
    evil = line | {"launch_id": "ff", "run": "../../etc", "created_at": "2999-01-01T00:00:00Z"}
    with (state / "history.jsonl").open("a") as file:
        file.write(json.dumps(evil) + "\n")
    done = bench("status")
    assert done.exit_code == 10
    assert "no run ../../etc" in done.stderr


def test_a_full_disk_here_starts_nothing_there(bench, tmpfs) -> None:
    state = tmpfs("size=4k")
    (state / "filler").write_bytes(b"x" * 4096)
    bench.env["DFLASHCTL_STATE_DIR"] = str(state / "state")
    done = bench("launch", "--tag", "quick")
    assert done.exit_code == 8
    assert "history cannot be written" in done.stderr
    assert not (bench.root / "runs").exists()


def test_a_disk_that_fills_up_meanwhile_does_not_hide_the_run(bench, tmpfs) -> None:
    state = tmpfs("size=16k")
    bench.env["DFLASHCTL_STATE_DIR"] = str(state)
    bench.trainer(
        f"""
        import contextlib
        with contextlib.suppress(OSError), open("{state}/filler", "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        """
    )
    (state / "history.jsonl").write_text("#" * 3700 + "\n")  # so that the next lines need a new page
    done = bench("launch", "--tag", "quick", "--startup-seconds", "30", "--json")
    assert done.exit_code == 0
    assert done.document["run"] == "quick-1"
    assert "history cannot be written" in done.document["warning"]


def test_two_writers_at_once_lose_no_line(bench) -> None:
    script = """
import sys
from pathlib import Path
from dflashctl.runs import History, RunRecord
history = History(Path("state"), {})
for number in range(300):
    record = RunRecord(launch_id=f"{sys.argv[1]}{number}", host="h", place="p", tag="t", created_at="c", hypothesis="x" * 3000)
    history.append(record)
"""
    writers = [subprocess.Popen([sys.executable, "-c", script, name], cwd=bench.folder) for name in "abcd"]
    assert [writer.wait(timeout=120) for writer in writers] == [0] * 4
    lines = (bench.folder / "state/history.jsonl").read_text().splitlines()
    assert len({json.loads(line)["launch_id"] for line in lines}) == 1200
