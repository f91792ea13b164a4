"""A run belongs to nobody's session: whatever ends around it, it goes on, and what was asked twice has started once."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

from labkit.laptop import SLEEPER, point

TREE = Path(__file__).parents[2]
STUBBORN = f"import signal, sys; signal.signal(signal.SIGHUP, lambda *_: sys.exit('hangup'))\n{SLEEPER}"
LOG = "/workspace/my runs/train_quick.log"


def is_up(ct, log: str = LOG) -> bool:
    return ct.run(["cat", log]).stdout == b"up\n"


def test_a_terminal_that_closes_takes_the_client_and_leaves_the_run(far, ct) -> None:
    far.trainer(STUBBORN)
    far("deploy")
    client, terminal = pty.fork()
    if client == 0:  # the child, whose controlling terminal this is
        os.chdir(far.folder)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test run under nohup has it ignored
        os.execve(far.executable, ["dflashctl", "launch", "--tag", "quick", "--startup-seconds", "60"], far.env)
    far.until(lambda: is_up(ct))
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(client, 0)[1]) != 0
    assert far("status", "ct200:quick-1", "--json").document["state"] == "running"


def test_a_session_with_a_terminal_on_the_box_itself(bench, lab, link, ct) -> None:
    """The command line inside the container, host `local`, typed over `ssh -tt`; then the cable is cut."""
    for source in (bench.folder / "experiments/quick.yaml", bench.trainer(STUBBORN)):
        ct.write(f"/workspace/{source.relative_to(bench.folder)}", source.read_text())
    for package in ("dflashctl", "trainer"):
        for source in (TREE / package).rglob("*.py"):
            ct.write(f"/workspace/{source.relative_to(TREE)}", source.read_text())
    words = "env HOME=/root DFLASHCTL_TRAINER=mytrainer DFLASHCTL_STATE_DIR=/workspace/state PYTHONPATH=/workspace"
    typed = f"{words} {bench.executable} launch --tag quick --startup-seconds 60"
    command = f"/usr/sbin/pct exec 200 -- sh -c 'cd /workspace && exec {typed}'"
    with lab.background(lab.ssh_command("pve-link", command, options=["-tt"]), stdin=subprocess.PIPE) as client:
        bench.until(lambda: is_up(ct, "/workspace/.dflash/train_quick.log"))
        assert link.cut() == 1
        client.wait(timeout=20)
    bench.until(lambda: not [line for line in ct.processes().values() if "dflashctl launch" in line])
    (pid,) = ct.run(["cut", "-d ", "-f1", "/workspace/.dflash/runs/quick-1/pid"], check=True).stdout.split()
    assert int(pid) in ct.processes()
    assert any("-m trainer" in line for line in ct.processes().values())


def test_a_launch_whose_link_breaks_finds_its_run_and_starts_no_second(bench, lab, link, ct) -> None:
    point(bench, lab, alias="pve-link")
    bench.trainer(SLEEPER)
    bench("deploy")
    process = bench.start("launch", "--tag", "quick", "--startup-seconds", "30", "--json")
    bench.until(lambda: is_up(ct))
    assert link.cut() == 1
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stderr
    assert b"found by its launch id" in stdout + stderr
    assert ct.run(["ls", "/workspace/my runs/runs"], check=True).stdout == b"quick-1\n"
    assert bench("runs").stdout.count("quick-") == 1
    assert bench("stop", "quick-1").exit_code == 0


SLOW_PYTHON = f"""#!/bin/sh
# the look at the installed packages takes as long as /workspace/hold is there
case "$2" in *importlib*metadata*)
    if [ -e /workspace/hold ]; then
        touch /workspace/held
        while [ -e /workspace/hold ]; do sleep 0.1; done
    fi ;;
esac
exec {sys.executable} "$@"
"""


def test_a_launch_that_was_given_up_before_it_started_starts_nothing_later(bench, lab, link, ct) -> None:
    ct.write("/workspace/python", SLOW_PYTHON, mode=0o755)
    point(bench, lab, alias="pve-link", python="/workspace/python")
    bench.trainer(SLEEPER)
    bench("deploy")
    ct.write("/workspace/hold", "")
    process = bench.start("launch", "--tag", "quick")
    bench.until((ct.workspace / "held").exists)
    assert link.cut() == 1
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 4
    assert b"nothing was started" in stderr
    (ct.workspace / "hold").unlink()
    bench.until(lambda: set(ct.processes()) == {1})  # what was still on its way has come to its end
    assert ct.run(["ls", "/workspace/my runs"], check=True).stdout.split() == [b"current", b"releases", b"withdrawn"]


def test_a_host_that_stays_away_leaves_the_answer_open(bench, lab, link, ct) -> None:
    point(bench, lab, alias="pve-link")
    bench.trainer(SLEEPER)
    bench("deploy")
    process = bench.start("launch", "--tag", "quick", "--startup-seconds", "30")
    bench.until(lambda: is_up(ct))
    link.refuse()
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 4
    assert b"whether it started is not known" in stderr
    assert b"runs --refresh" in stderr
    link.restore()
    assert bench("runs", "--refresh", "--host", "ct200").stdout.count("quick-1") == 1
    assert bench("status", "quick-1", "--json").document["state"] == "running"


def test_ctrl_c_during_the_start_up_window_leaves_the_run_alone(far, ct) -> None:
    far.trainer(SLEEPER)
    far("deploy")
    process = far.start("launch", "--tag", "quick", "--startup-seconds", "30")
    far.until(lambda: is_up(ct))
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"has started on ct200 and goes on" in stderr
    assert far("status", "quick-1", "--json").document["state"] == "running"
