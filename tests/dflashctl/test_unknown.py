"""What cannot be read, written or reached is not taken for free, dead, ended or nothing, and stops nothing that has begun."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
GPU = f"GPU-unknown-{os.getpid()}"
IDLE = """
case "$1" in --query-compute-apps=*) exit 0;; esac
echo "index, uuid, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%]"
"""
ROW = f"echo '0, {GPU}, NVIDIA H200, 0, 143771, 0'"


def fill(root: Path) -> None:
    """Leave nothing of a file system."""
    with (root / "big").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def launch(bench, *more: str, tag: str = "quick"):
    return bench("launch", "--tag", tag, "--startup-seconds", "0", "--json", *more)


@pytest.fixture
def cuda(bench):
    """A laptop whose host has one idle GPU."""
    bench.experiment("cuda", "cuda:0")
    bench.nvidia_smi(IDLE + ROW)
    bench.trainer(SLEEPER)
    return bench


def test_a_run_that_has_filled_the_disk_is_stopped(bench, tmpfs) -> None:
    bench.root = tmpfs("size=2m")
    bench.hosts(f"hosts:\n  local: {{transport: local, root: {bench.root}}}\n")
    bench.trainer(SLEEPER)
    assert launch(bench).exit_code == 0
    assert bench.until(lambda: bench.marked("quick-1"))
    fill(bench.root)
    done = bench("stop", "quick-1", "--grace", "5")
    assert (done.exit_code, bench.marked("quick-1")) == (0, [])
    assert done.stdout.startswith("local:quick-1 stopped")


@pytest.mark.parametrize(
    "answer", [ROW.replace(" 0, 143771", " [Unknown Error], 143771"), ROW.replace(GPU, "GPU-other")], ids=["memory", "gpu"]
)
def test_memory_that_cannot_be_read_after_a_stop_is_not_given_back(cuda, answer: str) -> None:
    assert launch(cuda, tag="cuda").exit_code == 0
    cuda.nvidia_smi(IDLE + answer)
    done = cuda("stop", "cuda-1")
    assert done.exit_code == 0
    assert "whether its GPUs are free is not known: the memory of GPU 0 cannot be read" in done.stdout


def test_of_two_launches_at_once_under_two_roots_of_a_machine_one_gets_the_gpu(cuda) -> None:
    cuda.hosts("default: a\nhosts:\n  a: {transport: local, root: .a}\n  b: {transport: local, root: .b}\n")
    for host in ("a", "b"):
        assert cuda("deploy", host).exit_code == 0
    words = ("launch", "--tag", "cuda", "--startup-seconds", "0", "--json", "--host")
    racers = {host: cuda.start(*words, host) for host in ("a", "b")}
    answers = {host: json.loads(racer.communicate(timeout=120)[0]) for host, racer in racers.items()}
    assert sorted(racer.returncode for racer in racers.values()) == [0, 6]
    (loser,) = (answer for answer in answers.values() if "error" in answer)
    assert "GPU 0" in loser["error"]["message"]
    assert "run cuda-1" in loser["error"]["message"]
    (winner,) = (host for host in racers if "error" not in answers[host])
    assert cuda("stop", f"{winner}:cuda-1").exit_code == 0


def test_a_run_that_is_launched_out_of_another_is_none_of_its_processes(bench) -> None:
    bench.trainer(SLEEPER)
    assert launch(bench).exit_code == 0
    mark = bench.launch_id("quick-1")
    mine = dict(bench.env)
    bench.env |= {"DFLASHCTL_LAUNCH_ID": mark, "DFLASHCTL_RUN": "quick-1"}
    assert launch(bench).exit_code == 0
    bench.env = mine
    assert bench("stop", "quick-1").exit_code == 0
    assert bench("status", "quick-2", "--json").document["state"] == "running"


def test_a_gpu_that_was_forced_stays_held_when_the_wrapper_is_killed(cuda) -> None:
    assert launch(cuda, tag="cuda").exit_code == 0
    assert launch(cuda, "--force", tag="cuda").exit_code == 0
    assert cuda("stop", "cuda-1").exit_code == 0
    lease = cuda.root / "leases" / GPU
    cuda.until(lambda: json.loads(lease.read_text() or "{}").get("run") == "cuda-2")
    wrapper = int((cuda.run_folder("cuda-2") / "pid").read_text().split()[0])
    os.kill(wrapper, signal.SIGKILL)
    refused = launch(cuda, tag="cuda")
    assert (refused.exit_code, "held by run cuda-2" in refused.document["error"]["message"]) == (6, True)
    assert cuda("stop", "cuda-2").exit_code == 0
    cuda.until(lambda: launch(cuda, tag="cuda").exit_code == 0)  # the lease ends with the run, within seconds


def test_one_killed_look_ends_no_tail(bench) -> None:
    bench.trainer("import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)\nprint('end')")
    assert launch(bench).exit_code == 0
    with bench.start("tail", "quick-1") as tail:
        assert tail.stdout.readline() == b"up\n"
        look = bench.until(lambda: next(iter(children(tail.pid)), None))
        os.kill(look, signal.SIGKILL)
        assert any(b"connecting again" in line for line in iter(tail.stderr.readline, b""))
        (bench.run_folder("quick-1") / "go").touch()
        stdout, _ = tail.communicate(timeout=60)
    assert (tail.returncode, stdout) == (0, b"end\n")


def children(pid: int) -> list[int]:
    """The programs of `onhost` that a command has running on host local."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                words = (path.parent / "cmdline").read_bytes().split(b"\0")
                number = int(path.parent.name)
                found += [number] if words[1:3] == [b"-B", b"-c"] else children(number)
    return found


def test_nobody_reading_stderr_changes_nothing(bench) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [bench.executable, "launch", "--tag", "quick", "--startup-seconds", "30"],
        cwd=bench.folder,
        env=bench.env,
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=False,
        timeout=120,
    )
    os.close(theirs)
    assert (done.returncode, b"quick-1 on local has already finished" in done.stdout) == (0, True)


def test_an_ssh_configuration_that_is_broken_takes_no_other_hosts_answer_away(bench) -> None:
    bench.hosts("default: a\nhosts:\n  a: {transport: local, root: .a}\n  far: {ssh: far, root: /srv}\n")
    (bench.folder / "bin/ssh").write_text("#!/bin/sh\necho port abc\n")
    (bench.folder / "bin/ssh").chmod(0o755)
    done = bench("status", "--all")
    assert done.exit_code == 4
    assert "a: no run is living" in done.stdout
    assert "far: error: host far: its ssh configuration cannot be used: " in done.stderr
    assert "fault of dflashctl" not in done.stderr


def test_ctrl_c_while_a_run_is_measured_says_that_it_goes_on(bench) -> None:
    bench.trainer(SLEEPER, "smoke.py")
    with bench.start("smoke", "--tag", "quick") as process:
        assert any(b"is under way" in line for line in iter(process.stderr.readline, b""))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"local:quick-smoke-1 goes on\nhint: dflashctl tail quick-smoke-1" in stderr


def test_a_run_that_could_not_be_written_down_leaves_no_folder(bench, tmpfs) -> None:
    bench.root = tmpfs("size=1m")
    bench.hosts(f"hosts:\n  local: {{transport: local, root: {bench.root}}}\n")
    assert bench("deploy").exit_code == 0
    fill(bench.root)
    done = launch(bench, "--no-deploy")
    assert (done.exit_code, "is full" in done.document["error"]["message"]) == (8, True)
    assert not list((bench.root / "runs").glob("quick-*"))


class Unprivileged:
    """The same commands by a user 0 who may not read what belongs to others."""

    def __init__(self, bench) -> None:
        self.bench = bench

    def __call__(self, *args: str) -> tuple[int, str, str]:
        drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-dac_override,-dac_read_search"]
        done = subprocess.run(
            [*drop, self.bench.executable, *args],
            cwd=self.bench.folder,
            env=self.bench.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def unprivileged(bench) -> Unprivileged:
    if os.geteuid() != 0:
        pytest.skip("needs root to give files to another user")
    return Unprivileged(bench)


def lock_away(path: Path, mode: int) -> None:
    path.chmod(mode)
    os.chown(path, 12345, 12345)


def test_a_run_whose_files_may_not_be_read_is_unknown_and_not_dead(bench, unprivileged: Unprivileged) -> None:
    bench.trainer(SLEEPER)
    assert launch(bench).exit_code == 0
    for name in ("pid", "run.json", "run.sh"):
        lock_away(bench.run_folder("quick-1") / name, 0o600)
    _, stdout, _ = unprivileged("status", "quick-1")
    assert stdout.startswith("local:quick-1 unknown")
    _, stdout, _ = unprivileged("status", "-H", "local")
    assert stdout.startswith("quick-1 unknown")
    code, _, stderr = unprivileged("stop", "quick-1", "--grace", "1")
    assert (code, "quick-1: run.json and run.sh cannot be read" in stderr) == (11, True)


def test_a_folder_of_runs_that_may_not_be_read_is_not_an_empty_one(bench, unprivileged: Unprivileged) -> None:
    assert launch(bench).exit_code == 0
    lock_away(bench.root / "runs", 0o700)
    code, stdout, stderr = unprivileged("status", "-H", "local")
    assert (code, "no run is living" in stdout, str(bench.root) in stderr) == (8, False, True)
    _, stdout, _ = unprivileged("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(stdout)["hosts"][0]["checks"]}
    assert (checks["leftovers"]["state"], "cannot be listed" in checks["leftovers"]["found"]) == ("unknown", True)


def test_a_link_that_cannot_be_made_ends_no_launch_and_loses_no_run(bench, unprivileged: Unprivileged) -> None:
    assert launch(bench).exit_code == 0
    bench.experiment("other")
    lock_away(bench.root, 0o755)
    code, stdout, stderr = unprivileged("launch", "--tag", "other", "--no-deploy", "--startup-seconds", "30")
    assert (code, stdout.startswith("other-1 on local has already finished")) == (0, True), stderr
    assert f"warning: {bench.root}/train_other.log does not point at " in stderr
    assert bench("runs").stdout.startswith("other-1\t")
