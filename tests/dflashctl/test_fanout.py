"""`gpus`, `deploy`, `status`, `stop`, `runs --refresh` on several hosts at once, some of which are dead or hang."""

import json
import os
import pty
import socket
import subprocess
from collections.abc import Iterator

import pytest

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
HOSTS = """
default: a
hosts:
  a: {{transport: local, root: .a}}
  b: {{transport: local, root: .b}}
  dead: {{ssh: nobody@127.0.0.1:{port}, root: /tmp/nowhere}}
"""


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and says nothing: a host that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def fleet(bench):
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    bench.hosts(HOSTS.format(port=closed))
    bench.ssh_without_configuration()
    yield bench
    for root in (".a", ".b"):
        bench.root = bench.folder / root
        bench.end_runs()


def launch(fleet, host: str) -> None:
    assert fleet("launch", "--tag", "quick", "--host", host, "--startup-seconds", "0.3").exit_code == 0


def answered(fleet, answer: str, *args: str) -> tuple[int, bytes]:
    """Exit code and stderr of a command that asks at a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [fleet.executable, *args], cwd=fleet.folder, env=fleet.env, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        os.write(ours, f"{answer}\n".encode())
        _, stderr = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    return process.returncode, stderr


def test_deploy_to_all_with_one_dead(fleet) -> None:
    done = fleet("deploy", "--all")
    assert done.exit_code == 4
    lines = done.stdout.splitlines()
    assert {line.partition(": ")[0] for line in lines} == {"a", "b"}
    assert "a:   trainer/__main__.py" in lines
    assert "dead: error: host dead" in done.stderr
    document = fleet("deploy", "b", "dead", "a", "b", "--json").document
    assert [row["host"] for row in document["hosts"]] == ["b", "dead", "a"]
    assert [row["error"] and row["error"]["code"] for row in document["hosts"]] == [None, "host_unreachable", None]
    assert document["hosts"][0]["release"] == document["hosts"][2]["release"]
    fleet.trainer("def broken(:\n", "broken.py")
    done = fleet("deploy", "a", "b", "--json")
    assert done.exit_code == 8
    assert {line.partition(": ")[0] for line in fleet("deploy", "a", "b").stderr.splitlines()} == {"a", "b"}
    assert all("broken.py" in row["parse_check"]["errors"][0] for row in done.document["hosts"])


def test_a_hanging_host_holds_up_nobody(fleet, silent_port: int) -> None:
    fleet.hosts(HOSTS.format(port=silent_port))
    with fleet.start("deploy", "dead", "a") as process:
        assert process.stdout
        assert process.stdout.readline().startswith(b"a: release")
        assert process.poll() is None  # still waiting for the one that hangs
        os.kill(process.pid, 2)
        process.communicate(timeout=15)
    assert process.returncode == 130


def test_gpus_of_all(fleet) -> None:
    fleet.nvidia_smi("exit 9")
    done = fleet("gpus", "--all", "--json")
    assert done.exit_code == 7
    assert [row["host"] for row in done.document["hosts"]] == ["a", "b", "dead"]
    assert "exit status 9" in done.document["hosts"][1]["error"]
    done = fleet("gpus", "a", "b")
    assert {line.partition(":")[0] for line in done.stderr.splitlines()} == {"a", "b"}


def test_status_of_hosts_shows_what_lives_there(fleet) -> None:
    fleet.trainer(SLEEPER)
    launch(fleet, "a")
    launch(fleet, "a")
    history = (fleet.folder / "state/history.jsonl").read_bytes()
    done = fleet("status", "-H", "a", "-H", "b")
    assert done.exit_code == 0
    texts = {"a: quick-1 running", "a: quick-2 running", "b: no run is living"}
    assert {line.partition(",")[0] for line in done.stdout.splitlines()} == texts
    done = fleet("status", "--all", "--json")
    assert done.exit_code == 4
    runs = {row["host"]: row.get("runs") for row in done.document["hosts"]}
    assert [run["run"] for run in runs["a"]] == ["quick-1", "quick-2"]
    assert (runs["b"], runs["dead"]) == ([], None)
    assert (fleet.folder / "state/history.jsonl").read_bytes() == history


def test_stop_all_stops_mine_after_a_yes_and_nobody_elses(fleet) -> None:
    fleet.trainer(SLEEPER)
    launch(fleet, "a")
    launch(fleet, "b")
    launch(fleet, "b")
    record = fleet.folder / ".b/runs/quick-2/run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"launched_by": "bob@elsewhere"}))
    refused = fleet("stop", "--all")
    assert refused.exit_code == 2
    assert "a:quick-1, b:quick-1" in refused.stderr
    code, stderr = answered(fleet, "n", "stop", "-H", "a")
    assert (code, b"stop a:quick-1?" in stderr, b"nothing was stopped" in stderr) == (130, True, True)
    assert fleet("status", "a:quick-1", "--json").document["state"] == "running"
    done = fleet("stop", "--all", "--yes")
    assert done.exit_code == 4
    assert sorted(done.stdout.splitlines()) == ["a: quick-1 stopped", "b: quick-1 stopped"]
    assert "left alone: b:quick-2" in done.stderr
    assert "dead: error" in done.stderr
    assert fleet("status", "b:quick-2", "--json").document["state"] == "running"
    done = fleet("stop", "-H", "b", "--json")
    assert (done.exit_code, done.document["hosts"][0]["runs"]) == (0, [])
    assert {line.split("\t")[2] for line in fleet("runs", "--host", "a").stdout.splitlines()} == {"stopped"}


def test_runs_refresh_asks_all_and_names_the_dead(fleet) -> None:
    launch(fleet, "b")
    fleet.env["DFLASHCTL_STATE_DIR"] = str(fleet.folder / "second laptop")
    done = fleet("runs", "--refresh", "--json")
    assert done.exit_code == 4
    assert [run["run"] for run in done.document["runs"]] == ["quick-1"]
    assert [error["host"] for error in done.document["errors"]] == ["dead"]


@pytest.mark.parametrize(
    "args", [["deploy", "a", "--all"], ["gpus", "a", "--all"], ["stop"], ["stop", "x-1", "--all"], ["status", "x-1", "-H", "a"]]
)
def test_what_does_not_go_together_is_usage(fleet, args: list[str]) -> None:
    assert fleet(*args).exit_code == 2
