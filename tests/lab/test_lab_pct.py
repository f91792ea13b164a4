"""The `pct` stand-in is as unkind as the real one: one test a fact that the command line relies on."""

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable

import pytest
from labkit.container import Container, Options
from labkit.deadline import wait_until
from labkit.lab import CONTAINER_ON_OTHER_NODE, Lab
from labkit.node import Completed

Pct = Callable[..., Completed]


@pytest.fixture
def pct(lab: Lab) -> Pct:
    """Call pct on the node, without ssh."""
    return lambda *words, **more: lab.node.run(["pct", *words], **more)


@pytest.mark.parametrize("status", [255, 25, 2])
def test_stopped_unknown_and_elsewhere_differ_by_text_only(lab: Lab, ct: Container, pct: Pct, status: int) -> None:
    lab.pct.dies_with(status)
    ct.stop()
    said = {}
    for name, vmid in {"stopped": 200, "unknown": 999, "elsewhere": CONTAINER_ON_OTHER_NODE}.items():
        done = pct("exec", str(vmid), "--", "true")
        assert (done.returncode, done.stdout) == (status, b"")
        said[name] = done.stderr.decode()
    assert said["stopped"] == "container '200' not running!\n"
    assert said["unknown"] == "Configuration file 'nodes/pve/lxc/999.conf' does not exist\n"
    assert said["elsewhere"] == "Configuration file 'nodes/pve/lxc/300.conf' does not exist\n"
    assert lab.node.path("/etc/pve/nodes/pve2/lxc/300.conf").exists()


def test_status_list_and_config(lab: Lab, ct: Container, pct: Pct) -> None:
    lab.container(201).stop()
    assert pct("status", "200").stdout == b"status: running\n"
    assert pct("status", "201").stdout == b"status: stopped\n"
    assert b"status: running\n" in pct("status", "200", "--verbose").stdout
    header, *rows = pct("list").stdout.decode().splitlines()
    assert header.split() == ["VMID", "Status", "Lock", "Name"]
    assert [row.split() for row in rows] == [["200", "running", "ct200"], ["201", "stopped", "ct201"]]
    assert b"hostname: ct200\n" in pct("config", "200").stdout
    assert ct.state() == "RUNNING"


@pytest.mark.parametrize(
    ("script", "status"), [("exit 7", 7), ("exit 255", 255), ("kill -TERM $$", 143), ("exec /etc/hosts", 126)]
)
def test_status_of_the_command_comes_through(ct: Container, pct: Pct, script: str, status: int) -> None:
    assert pct("exec", str(ct.vmid), "--", "sh", "-c", script).returncode == status


def test_program_that_is_not_there_is_127(ct: Container, pct: Pct) -> None:
    assert pct("exec", str(ct.vmid), "--", "no-such-program").returncode == 127


def test_attached_process_has_no_parent_no_group_and_no_session(ct: Container, pct: Pct) -> None:
    fields = pct("exec", str(ct.vmid), "--", "cat", "/proc/self/stat").stdout.rpartition(b") ")[2].split()
    ppid, pgrp, session, tty = fields[1:5]
    assert (ppid, pgrp, session, tty) == (b"0", b"0", b"0", b"0")


def test_usr_local_is_not_on_path(ct: Container, pct: Pct) -> None:
    ct.write("/usr/local/bin/tool", "#!/bin/sh\necho found\n", 0o755)
    assert pct("exec", "200", "--", "sh", "-c", "echo $PATH").stdout == b"/sbin:/bin:/usr/sbin:/usr/bin\n"
    assert pct("exec", "200", "--", "tool").returncode == 127
    assert pct("exec", "200", "--", "/usr/local/bin/tool").stdout == b"found\n"


def test_environment_and_directory_of_the_caller_leak_in(lab: Lab, ct: Container) -> None:
    command = ["env", "-i", "SECRET=a b", "odd.name=1", "SSL_CERT_FILE=/x", "sh", "-c", 'cd /var && exec pct "$@"', "sh"]
    show = ["--", "sh", "-c", "pwd; tr '\\0' '\\n' </proc/self/environ"]
    lines = lab.node.run([*command, "exec", "200", *show]).stdout.decode().splitlines()
    assert lines[0] == "/var"
    assert {"SECRET=a b", "container=lxc"} <= set(lines)
    assert not [line for line in lines if line.startswith(("SSL_CERT", "LC_"))]
    for words in (["exec", "200", "--keep-env", "0", *show], ["exec", "--keep-env=0", "200", *show]):
        assert "SECRET=a b" not in lab.node.run([*command, *words]).stdout.decode().splitlines()
    lab.pct.keeps_environment(False)
    cleared = lab.node.run([*command, "exec", "200", *show]).stdout.decode().splitlines()
    assert "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" in cleared
    assert ct.state() == "RUNNING"


def test_words_are_never_evaluated(ct: Container, pct: Pct) -> None:
    words = ["", "a  b", "$HOME", "`id`", "*", "it's", '"', "\\", "two\nlines", "-n", "--", "ünï"]
    done = pct("exec", str(ct.vmid), "--", "printf", "%s\\0", *words)
    assert done.stdout.decode().split("\0")[:-1] == words


def test_words_with_a_dash_belong_to_pct_before_the_double_dash(ct: Container, pct: Pct) -> None:
    done = pct("exec", str(ct.vmid), "ls", "-la")
    assert done.returncode == 255
    assert b"Unknown option: la\n400 unable to parse option\n" in done.stderr
    assert pct("exec", str(ct.vmid), "echo", "x").stdout == b"x\n"


def test_empty_command_is_refused(ct: Container, pct: Pct) -> None:
    done = pct("exec", str(ct.vmid), "--")
    assert done.returncode == 255
    assert done.stderr.startswith(b"missing command")


def test_binary_stdin_and_large_output_on_both_streams(ct: Container, pct: Pct) -> None:
    payload = os.urandom(2**20)
    script = "sha256sum; head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2"
    done = pct("exec", str(ct.vmid), "--", "sh", "-c", script, stdin=payload)
    assert done.stdout.startswith(hashlib.sha256(payload).hexdigest().encode())
    assert len(done.stdout) > 3_000_000
    assert len(done.stderr) == 3_000_000


def test_exec_eats_the_callers_stdin(lab: Lab, ct: Container) -> None:
    loop = f"while read -r line; do echo got $line; pct exec {ct.vmid} -- cat >/dev/null; done"
    assert lab.node.run(["sh", "-c", loop], stdin=b"1\n2\n3\n").stdout == b"got 1\n"


def test_frozen_container_says_running_and_exec_hangs(ct: Container, pct: Pct) -> None:
    ct.freeze()
    assert pct("status", str(ct.vmid)).stdout == b"status: running\n"
    with pytest.raises(subprocess.TimeoutExpired):
        pct("exec", str(ct.vmid), "--", "true", timeout_s=0.7)
    ct.unfreeze()
    assert pct("exec", str(ct.vmid), "--", "true").returncode == 0


def test_killing_pct_leaves_the_process_inside(lab: Lab, ct: Container) -> None:
    script = "touch /workspace/started; while :; do sleep 60; done"
    command = lab.node.command(["pct", "exec", str(ct.vmid), "--", "sh", "-c", script])
    with lab.background(command) as caller:
        wait_until((ct.workspace / "started").exists, "the script to start")
        (attach,) = [pid for pid, line in lab.node.processes().items() if line.startswith("lxc-attach ")]
        lab.node.send_signal(attach, signal.SIGKILL)
        assert caller.wait(timeout=10) != 0
    assert any("sleep" in line for line in ct.processes().values())


def test_noise_on_stderr_comes_with_every_call(lab: Lab, ct: Container, pct: Pct) -> None:
    lab.pct.says_first("perl: warning: Setting locale failed.")
    done = pct("exec", str(ct.vmid), "--", "echo", "x")
    assert (done.returncode, done.stdout) == (0, b"x\n")
    assert done.stderr == b"perl: warning: Setting locale failed.\n"


def test_failed_push_and_pull_exit_with_0(lab: Lab, ct: Container, pct: Pct) -> None:
    lab.node.path("/run/lab-push").write_text("data")
    try:
        assert pct("push", "200", "/run/lab-push", "/workspace/ok", "--perms", "600").returncode == 0
        assert (ct.workspace / "ok").read_text() == "data"
        assert (ct.workspace / "ok").stat().st_mode & 0o777 == 0o600
        for words in (["/run/lab-push", "/no/such/dir"], ["/tmp/no-such-file", "/workspace/x"]):
            done = pct("push", "200", *words)
            assert done.returncode == 0
            assert done.stderr.startswith(b"TASK ERROR: failed to ")
        done = pct("pull", "200", "/no/such/file", "/run/lab-push")
        assert (done.returncode, lab.node.path("/run/lab-push").read_text()) == (0, "")
    finally:
        lab.node.path("/run/lab-push").unlink()


def test_push_to_a_full_disk_is_silent(lab: Lab, pct: Pct) -> None:
    ct = lab.container(200, Options(workspace_mib=1))
    big = lab.node.path("/run/big")
    big.write_bytes(bytes(2**21))
    done = pct("push", "200", "/run/big", "/workspace/big")
    big.unlink()
    assert (done.returncode, done.stderr) == (0, b"")
    assert (ct.workspace / "big").stat().st_size < 2**21


def test_push_holds_the_lock_and_exec_does_not_care(lab: Lab, ct: Container, pct: Pct) -> None:
    lab.pct.copies_take(0, lock_wait_s=0.2)
    refusal = b"can't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout"
    assert pct("push", "200", "/etc/hosts", "/workspace/a").returncode == 0
    lock = "/run/lock/lxc/pve-config-200.lock"
    with lab.background(lab.node.command(["flock", lock, "sh", "-c", "echo held; read x"]), stdin=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        done = pct("push", "200", "/etc/hosts", "/workspace/b")
        assert (done.returncode, refusal in done.stderr) == (255, True)
        assert pct("exec", str(ct.vmid), "--", "true").returncode == 0


def test_a_slow_push_keeps_the_next_one_out(lab: Lab, ct: Container) -> None:
    lab.pct.copies_take(60, lock_wait_s=0.1)
    command = lab.node.command(["pct", "push", str(ct.vmid), "/etc/hosts", "/workspace/a"])
    with lab.background(command) as first, lab.background(command) as second:
        codes = wait_until(lambda: [c for c in (first.poll(), second.poll()) if c is not None], "one of them to be refused")
        assert codes == [255]


def test_calls_are_recorded_word_by_word(lab: Lab, ct: Container, pct: Pct) -> None:
    pct("exec", str(ct.vmid), "--", "printf", "a b\nc")
    pct("status", "200")
    assert lab.pct.calls() == [["exec", "200", "--", "printf", "a b\nc"], ["status", "200"]]
