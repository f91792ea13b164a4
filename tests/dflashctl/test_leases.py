"""A GPU belongs to one run at a time, for exactly as long as anything of that run lives."""

import fcntl
import json
import os
import signal
import subprocess
import time

import pytest

from dflashctl.onhost import leases
from dflashctl.onhost.layout import Layout

# leases of every root are seen: each worker of a test run has cards of its own
FIRST, SECOND = (f"GPU-{name}-{os.getpid()}" for name in ("aaaa", "bbbb"))
TWO_IDLE = f"""
case "$1" in --query-compute-apps=*) exit 0;; esac
echo "index, uuid, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%]"
echo "0, {FIRST}, NVIDIA H200, $(cat memory 2>/dev/null || echo 0), 143771, 0"
echo "1, {SECOND}, NVIDIA H200, 0, 143771, 0"
"""
GO = ("launch", "--tag", "cuda", "--startup-seconds", "0", "--json")


@pytest.fixture
def cuda(bench):
    """A laptop whose host has two idle GPUs; what GPU 0 holds is in the file `memory`."""
    bench.experiment("cuda", "cuda:0")
    bench.nvidia_smi(f"cd '{bench.folder}'\n{TWO_IDLE}")
    bench.trainer("import time; time.sleep(600)")
    assert bench("deploy").exit_code == 0
    return bench


def holding(bench, mib: int) -> None:
    """What GPU 0's memory reads from now on; never nothing, for somebody may be looking."""
    (bench.folder / "memory.new").write_text(str(mib))
    (bench.folder / "memory.new").replace(bench.folder / "memory")


def test_a_process_that_ends_while_others_are_looked_at_is_passed_over(tmp_path, monkeypatch) -> None:
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: ["4194305", *listdir(path)] if path == "/proc" else listdir(path))
    lease = tmp_path / "one/leases" / FIRST
    lease.parent.mkdir(parents=True)
    lease.write_text('{"run": "quick-7"}')
    gpus = [{"index": 0, "uuid": FIRST}]
    with lease.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert [held.note for held in leases.held(Layout(str(tmp_path / "other")), gpus)] == [{"run": "quick-7"}]
    assert leases.held(Layout(str(tmp_path / "other")), gpus) == []


def gpu_of(bench, index: int) -> dict:
    return bench("gpus", "--json").document["hosts"][0]["gpus"][index]


def test_of_two_launches_at_once_one_starts_and_the_other_says_who_won(cuda) -> None:
    racers = [cuda.start(*GO, "--gpus", "0") for _ in range(2)]
    answers = [json.loads(racer.communicate(timeout=120)[0]) for racer in racers]
    assert sorted(racer.returncode for racer in racers) == [0, 6]
    refusal = next(answer["error"] for answer in answers if "error" in answer)
    assert "is held by run cuda-1 of " in refusal["message"]
    assert "@" in refusal["message"]
    assert "since 20" in refusal["message"]
    assert "--wait-gpu" in refusal["hint"]
    assert cuda.run_folder("cuda-1").exists()
    assert not cuda.run_folder("cuda-2").exists()


def test_a_lease_lives_exactly_as_long_as_the_run(cuda) -> None:
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    held = gpu_of(cuda, 0)
    assert held["state"] == "busy"
    assert "held by run cuda-1" in held["reason"]
    assert cuda("stop", "cuda-1").exit_code == 0
    assert gpu_of(cuda, 0)["state"] == "idle"


def test_a_wrapper_that_is_killed_leaves_the_lease_to_the_trainer(cuda) -> None:
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    wrapper = int((cuda.run_folder("cuda-1") / "pid").read_text().split()[0])
    cuda.until(lambda: len(cuda.marked("cuda-1")) >= 1)
    os.kill(wrapper, signal.SIGKILL)
    cuda.until(lambda: cuda("status", "cuda-1", "--json").document["state"] == "lost")
    assert gpu_of(cuda, 0)["state"] == "busy"
    for pid in cuda.marked("cuda-1"):
        os.kill(pid, signal.SIGKILL)
    cuda.until(lambda: gpu_of(cuda, 0)["state"] == "idle")


def test_a_start_by_hand_takes_the_lease_too(cuda) -> None:
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    assert cuda("stop", "cuda-1").exit_code == 0
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    by_hand = ["sh", str(cuda.run_folder("cuda-1") / "run.sh")]
    refused = subprocess.run(by_hand, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert "another run holds one of its GPUs" in refused.stderr
    assert cuda("status", "cuda-1", "--json").document["state"] == "stopped"
    assert cuda("stop", "cuda-2").exit_code == 0
    assert subprocess.run(by_hand, timeout=60).returncode == 0
    cuda.until(lambda: cuda("status", "cuda-1", "--json").document["state"] == "running")
    assert "held by run cuda-1" in gpu_of(cuda, 0)["reason"]
    assert cuda(*GO, "--gpus", "0").exit_code == 6


def test_a_lease_file_that_lies_about_holds_nothing(cuda) -> None:
    leases = cuda.root / "leases"
    leases.mkdir()
    (leases / FIRST).write_text('{"run": "long-gone-3", "by": "ann@laptop", "since": "2026-01-01T00:00:00Z"}\n')
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    assert json.loads((leases / FIRST).read_text())["run"] == "cuda-1"


def test_wait_gpu_starts_when_the_gpu_is_free(cuda) -> None:
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    waiting = cuda.start(*GO, "--gpus", "0", "--wait-gpu")
    assert waiting.stderr
    for line in waiting.stderr:
        if b"waiting: " in line:
            assert b"held by run cuda-1" in line
            break
    assert waiting.poll() is None
    assert cuda("stop", "cuda-1").exit_code == 0
    stdout, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert json.loads(stdout)["run"] == "cuda-2"


def test_wait_gpu_ends_after_its_seconds(cuda) -> None:
    holding(cuda, 9000)
    begun = time.monotonic()
    done = cuda(*GO, "--gpus", "0", "--wait-gpu", "2")
    assert (done.exit_code, time.monotonic() - begun >= 2) == (6, True)
    assert "9000 MiB" in done.document["error"]["message"]


def test_a_wait_is_said_once_though_numbers_change(cuda) -> None:
    looks = cuda.folder / "looks"
    cuda.nvidia_smi(f"cd '{cuda.folder}'\necho >> looks\n{TWO_IDLE}")
    holding(cuda, 9000)
    waiting = cuda.start(*GO, "--gpus", "0", "--wait-gpu")
    assert waiting.stderr
    assert any(b"9000 MiB" in line for line in iter(waiting.stderr.readline, b""))
    holding(cuda, 9500)
    enough = looks.stat().st_size + 12  # more than the calls of one query that has begun, and of a whole one
    cuda.until(lambda: looks.stat().st_size > enough, seconds=120)
    holding(cuda, 0)
    stdout, stderr = waiting.communicate(timeout=60)
    assert (waiting.returncode, json.loads(stdout)["run"]) == (0, "cuda-1")
    assert b"waiting: " not in stderr


@pytest.mark.parametrize(
    "words", [("eval", "cuda-1"), ("smoke", "--tag", "cuda"), ("prepare", "cuda")], ids=lambda words: words[0]
)
def test_whatever_starts_a_run_waits_for_gpus_or_takes_them(cuda, words: tuple[str, ...]) -> None:
    kind = words[0]
    path = cuda.experiment("cuda", "cuda:0")
    path.write_text(
        path.read_text().replace("path: /", "path: data/x") + "  prepare: {input: [chats.jsonl], regenerate: true}\n"
    )
    (cuda.root / "data/x").mkdir(parents=True)
    (cuda.root / "chats.jsonl").touch()
    cuda.trainer("import os; os.makedirs('checkpoints/step-1'); os.symlink('step-1', 'checkpoints/latest')")
    length = {"mean": 1.5, "interval_95": [1, 2], "tokens": 3, "verifications": 2, "prompts": 1}
    answer = {"go": True, "reasons": [], "acceptance_length": length}
    for name in ("evaluate", "smoke", "prepare"):
        cuda.trainer(f"import json; print(json.dumps({answer!r}))", f"{name}.py")
    assert cuda("launch", "--tag", "cuda", "--startup-seconds", "30").exit_code == 0
    if kind == "prepare":  # what is there is not made again
        (cuda.root / "data/x").rmdir()
    holding(cuda, 9000)
    refused = cuda(*words, "--gpus", "0", "--wait-gpu", "1", "--json")
    assert (refused.exit_code, "9000 MiB" in refused.document["error"]["message"]) == (6, True)
    forced = cuda(*words, "--gpus", "0", "--force", "--json")
    assert forced.exit_code == 0, forced.stderr
    assert forced.document["run"] == f"cuda-{kind}-1"
    if kind != "prepare":  # which says so in its document, as launch does
        assert "--force overrides that GPU 0 is busy: 9000 MiB held by" in forced.stderr


def test_ctrl_c_while_waiting_starts_nothing(cuda) -> None:
    holding(cuda, 9000)
    waiting = cuda.start(*GO, "--gpus", "0", "--wait-gpu")
    assert waiting.stderr
    assert any(b"waiting: " in line for line in iter(waiting.stderr.readline, b""))
    os.killpg(waiting.pid, signal.SIGINT)
    stdout, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert "nothing was started" in json.loads(stdout)["error"]["message"]
    assert not (cuda.root / "runs").exists()


def test_memory_that_is_not_given_back_is_no_success(cuda) -> None:
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    holding(cuda, 1133)
    done = cuda("stop", "cuda-1", "--json")
    assert done.exit_code == 11
    assert "GPU 0: 1133 MiB" in done.document["error"]["message"]
    assert "reset" in done.document["error"]["hint"]
    assert cuda("status", "cuda-1", "--json").document["state"] == "stopped"


def test_memory_that_is_given_back_late_is_waited_for(cuda) -> None:
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    holding(cuda, 1133)
    stopping = cuda.start("stop", "cuda-1")
    cuda.until(lambda: cuda("status", "cuda-1", "--json").document["state"] == "stopped")
    holding(cuda, 0)
    stopping.communicate(timeout=60)
    assert stopping.returncode == 0


def test_a_look_that_fails_after_a_stop_is_said(cuda) -> None:
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    cuda.nvidia_smi("echo 'Failed to initialize NVML: Unknown Error'; exit 255")
    done = cuda("stop", "cuda-1")
    assert done.exit_code == 0
    assert "whether its GPUs are free is not known" in done.stdout


def test_force_says_what_it_overrides(cuda) -> None:
    holding(cuda, 9000)
    done = cuda(*GO, "--gpus", "0", "--force")
    assert done.exit_code == 0
    (sentence,) = done.document["overridden"]
    assert "9000 MiB" in sentence
    again = cuda("launch", "--tag", "cuda", "--startup-seconds", "0", "--gpus", "0", "--force")
    assert again.exit_code == 0
    assert "--force overrides that GPU 0 is busy: it is held by run cuda-1" in again.stderr
    assert {cuda("status", run, "--json").document["state"] for run in ("cuda-1", "cuda-2")} == {"running"}
    assert cuda("stop", "cuda-2").exit_code == 0
    assert cuda("status", "cuda-1", "--json").document["state"] == "running"


def test_who_looks_is_not_taken_for_a_holder(cuda) -> None:
    """Twelve look at once at a lease whose file still tells of a run long gone."""
    leases = cuda.root / "leases"
    leases.mkdir()
    (leases / FIRST).write_text('{"run": "long-gone-3", "by": "ann@laptop", "since": "2026-01-01T00:00:00Z"}\n')
    lookers = [cuda.start("gpus", "--json") for _ in range(12)]
    answers = [json.loads(looker.communicate(timeout=120)[0]) for looker in lookers]
    assert {gpu["state"] for answer in answers for gpu in answer["hosts"][0]["gpus"]} == {"idle"}


def test_a_lease_under_another_root_holds_too(cuda) -> None:
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    cuda.hosts("hosts: {other: {transport: local, root: ./other-root}}")
    refused = cuda(*GO, "--gpus", "0", "--host", "other")
    assert refused.exit_code == 6
    assert "held by run cuda-1" in refused.document["error"]["message"]
    assert cuda(*GO, "--gpus", "1", "--host", "other").exit_code == 0
    assert cuda("stop", "other:cuda-1").exit_code == 0


def test_a_lease_that_cannot_be_read_is_unknown(cuda) -> None:
    (cuda.root / "leases").mkdir()
    (cuda.root / "leases" / FIRST).touch()
    flock = cuda.folder / "bin/flock"
    flock.write_text("#!/bin/sh\nexit 66\n")
    flock.chmod(0o755)
    assert [gpu_of(cuda, index)["state"] for index in (0, 1)] == ["unknown", "idle"]
    assert cuda(*GO, "--gpus", "0").exit_code == 7


def test_a_forced_run_takes_the_lease_over(cuda) -> None:
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    assert cuda(*GO, "--gpus", "0", "--force").exit_code == 0
    assert "held by run cuda-1" in gpu_of(cuda, 0)["reason"]
    assert cuda("stop", "cuda-1").exit_code == 0
    cuda.until(lambda: "held by run cuda-2" in gpu_of(cuda, 0)["reason"])
    assert cuda(*GO, "--gpus", "0").exit_code == 6
    assert cuda("stop", "cuda-2").exit_code == 0
    cuda.until(lambda: gpu_of(cuda, 0)["state"] == "idle")


def test_what_was_held_before_a_forced_launch_is_not_waited_for(cuda) -> None:
    holding(cuda, 9000)
    assert cuda(*GO, "--gpus", "0", "--force").exit_code == 0
    assert cuda("stop", "cuda-1").exit_code == 0


def test_one_failed_look_ends_no_wait(cuda) -> None:
    holding(cuda, 9000)
    cuda.nvidia_smi(
        f"cd '{cuda.folder}'\n[ ! -e broken ] || {{ touch seen; echo 'NVML: Unknown Error'; exit 255; }}\n{TWO_IDLE}"
    )
    waiting = cuda.start(*GO, "--gpus", "0", "--wait-gpu")
    assert waiting.stderr
    assert any(b"waiting: " in line for line in iter(waiting.stderr.readline, b""))
    (cuda.folder / "broken").touch()
    cuda.until((cuda.folder / "seen").exists)
    (cuda.folder / "broken").unlink()
    holding(cuda, 0)
    waiting.communicate(timeout=60)
    assert waiting.returncode == 0


def test_stop_of_a_lost_run_ends_what_it_left_and_looks_at_the_memory(cuda) -> None:
    assert cuda(*GO, "--gpus", "0").exit_code == 0
    cuda.until(lambda: len(cuda.marked("cuda-1")) >= 1)
    os.kill(int((cuda.run_folder("cuda-1") / "pid").read_text().split()[0]), signal.SIGKILL)
    cuda.until(lambda: cuda("status", "cuda-1", "--json").document["state"] == "lost")
    holding(cuda, 9000)
    done = cuda("stop", "cuda-1")
    assert (done.exit_code, "9000 MiB" in done.stderr) == (11, True)
    holding(cuda, 0)
    assert "had already ended: lost" in cuda("stop", "cuda-1").stdout
    assert cuda.marked("cuda-1") == []
