"""The lab's containers are real, and it leaves nothing behind. Facts about pct, ssh and nvidia-smi: test_lab_*.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from labkit import cgroups, requirements
from labkit.container import Container, Options
from labkit.deadline import wait_until
from labkit.lab import Lab, sweep

HERE = Path(__file__).parent
DEAF_JOB = """
trap '' TERM HUP INT
echo $$ >/workspace/new && mv /workspace/new /workspace/started
while :; do sleep 60; done
"""

KILLED_SESSION = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from labkit.lab import Lab
lab = Lab()
lab.container(200).freeze()
print(lab.directory, lab.node.outer_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_container_is_unprivileged_and_sees_only_itself(lab: Lab, ct: Container) -> None:
    other = lab.container(201)
    other.start_job(DEAF_JOB)
    wait_until((other.workspace / "started").exists, "the job in 201")
    assert ct.run(["cat", "/proc/self/uid_map"]).stdout.split() == [b"0", b"100000", b"65536"]
    assert set(ct.processes()) == {1}
    assert any("sleep" in line for line in other.processes().values())


def test_lo_is_up_and_the_own_name_resolves_as_torchrun_needs(ct: Container) -> None:
    assert ct.run(["getent", "hosts", "ct200"]).stdout.split()[0] == b"127.0.1.1"
    assert b"inet 127.0.0.1/8" in ct.run(["busybox", "ip", "addr", "show", "lo"]).stdout


def test_workspace_is_writable_on_both_sides(ct: Container) -> None:
    (ct.workspace / "in").write_text("x")
    assert ct.run(["sh", "-c", "cp /workspace/in /workspace/out && stat -c %u /workspace/out"]).stdout == b"0\n"
    assert (ct.workspace / "out").stat().st_uid == ct.owner_uid


def test_this_sessions_python_runs_inside_with_its_packages(ct: Container) -> None:
    done = ct.run([sys.executable, "-c", "import pytest, sys; print(sys.prefix)"], check=True)
    assert done.stdout.decode().strip() == sys.prefix
    assert ct.run(["touch", f"{sys.prefix}/x"]).returncode != 0


def test_stop_kills_a_job_that_ignores_term(ct: Container, lab: Lab) -> None:
    ct.start_job(DEAF_JOB)
    wait_until((ct.workspace / "started").exists, "the job to start")
    assert _jobs(lab)
    ct.stop()
    assert ct.state() == "STOPPED"
    assert not _jobs(lab)
    ct.start()
    assert set(ct.processes()) == {1}


def test_crash_leaves_the_files_and_no_process(ct: Container) -> None:
    ct.start_job(DEAF_JOB)
    wait_until((ct.workspace / "started").exists, "the job to start")
    ct.crash()
    assert ct.state() == "STOPPED"
    assert (ct.workspace / "started").exists()


def test_memory_limit_kills_for_real_and_is_counted(lab: Lab) -> None:
    ct = lab.container(200, Options(memory_mib=32))
    done = ct.run(["tail", "/dev/zero"])
    assert done.returncode == 137
    assert ct.oom_kills() == 1
    assert set(ct.processes()) == {1}


def test_kill_without_the_limit_is_137_and_not_counted(ct: Container) -> None:
    assert ct.run(["sh", "-c", "kill -KILL $$"]).returncode == 137
    assert ct.oom_kills() == 0


def test_small_workspace_gets_really_full(lab: Lab) -> None:
    ct = lab.container(200, Options(workspace_mib=1))
    done = ct.run(["dd", "if=/dev/zero", "of=/workspace/big", "bs=64k", "count=32"])
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr
    assert (ct.workspace / "big").stat().st_size == 2**20


def test_process_on_the_node_names_its_container_and_the_pid_inside(lab: Lab, ct: Container) -> None:
    ct.start_job(DEAF_JOB)
    wait_until((ct.workspace / "started").exists, "the job to start")
    job = ct.pid_on_node(int((ct.workspace / "started").read_text()))
    assert "trap" in lab.node.processes()[job]
    assert "/lxc/200/ns" in lab.node.path(f"/proc/{job}/cgroup").read_text()


def test_destroyed_container_is_unknown(lab: Lab) -> None:
    lab.container(201)
    assert b"201" in lab.node.run(["pct", "list"]).stdout
    lab.reset()
    assert lab.node.run(["pct", "list"]).stdout == b""


def test_machine_sees_nothing_of_it(lab: Lab, ct: Container) -> None:
    assert ct.state() == "RUNNING"
    assert lab.node.path("/usr/sbin/pct").exists()
    assert not Path("/usr/sbin/pct").exists()
    assert not Path("/run/dflash-lab").exists()
    assert "dflash-lab" not in Path("/proc/self/mounts").read_text()


def test_killed_session_leaves_no_process_and_the_next_one_sweeps_the_rest(lab: Lab) -> None:
    command = [sys.executable, "-c", KILLED_SESSION, str(HERE)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=30, check=False)
    directory, outer_pid = done.stdout.decode().split()
    assert done.returncode == -9
    wait_until(lambda: not Path(f"/proc/{outer_pid}").exists(), "the killed session's node to end")

    def swept() -> bool:
        sweep()  # Passes over it until the last process has let go of the lock.
        return not Path(directory).exists()

    wait_until(swept, "the leftovers to be swept")
    assert Path(directory).name not in cgroups.names()
    assert lab.directory.name in cgroups.names()


def test_what_is_missing_is_named_and_fails_only_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "SEARCH_PATH", "/nowhere")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "Debian package lxc (for lxc-start, lxc-attach)" in requirements.missing()
    assert any(line.startswith("root") for line in requirements.missing())
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="openssh-server"):
        requirements.require()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="openssh-server"):
        requirements.require()


def test_setup_wants_what_the_lab_requires_and_is_silent_when_all_is_there() -> None:
    script = HERE / "setup.sh"
    lines = [line.split()[1:3] for line in script.read_text().splitlines() if line.startswith("want ")]
    assert dict(lines) == requirements.PACKAGE_OF
    if not requirements.missing():
        done = subprocess.run(["sh", str(script)], capture_output=True, timeout=20, check=True)
        assert done.stdout + done.stderr == b""


def _jobs(lab: Lab) -> list[int]:
    return [pid for pid, line in lab.node.processes().items() if "trap" in line]
