"""The sshd, the jump host, the accounts and the link behave as a user's would."""

import subprocess

import pytest
from labkit.container import Container
from labkit.deadline import wait_until
from labkit.lab import Lab
from labkit.link import Link

ALIVE = ("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=1")


def test_ssh_joins_its_words_for_one_shell(lab: Lab, ct: Container) -> None:
    exec_ = ["/usr/sbin/pct", "exec", str(ct.vmid), "--"]
    assert lab.ssh("pve", *exec_, "bash", "-lc", "echo A; echo B").stdout == b"\nB\n"
    assert lab.ssh("pve", *exec_, "bash", "-lc", "'echo A; echo B'").stdout == b"A\nB\n"
    # The second command of the first line ran on the hypervisor, not in the container.
    assert lab.ssh("pve", *exec_, "true;", "hostname").stdout == b"pve\n"
    assert lab.ssh("pve", *exec_, "hostname").stdout == b"ct200\n"


def test_binary_stdin_reaches_the_container(lab: Lab, ct: Container) -> None:
    payload = bytes(range(256)) * 4096
    lab.ssh("pve", f"pct exec {ct.vmid} -- tee /workspace/copy >/dev/null", stdin=payload)
    assert (ct.workspace / "copy").read_bytes() == payload


def test_remote_255_and_no_connection_look_alike_by_status(lab: Lab, link: Link) -> None:
    assert lab.ssh("pve", "exit 255").returncode == 255
    link.refuse()
    done = lab.ssh("pve-link", "true")
    assert done.returncode == 255
    assert done.stderr != b""


@pytest.mark.parametrize("alias", ["pve-wrong-key", "pve-unknown-key"])
def test_host_key_that_is_not_known_is_refused(lab: Lab, alias: str) -> None:
    done = lab.ssh(alias, "true")
    assert done.returncode == 255
    assert b"Host key verification failed" in done.stderr


def test_accept_new_learns_the_key(lab: Lab) -> None:
    assert lab.ssh("pve-accept-new", "true").returncode == 0
    assert f"[127.0.0.1]:{lab.ports.pve} " in (lab.directory / "ssh/known_hosts_new").read_text()


def test_no_checking_connects_to_anybody(lab: Lab) -> None:
    assert lab.ssh("pve-unchecked", "true").returncode == 0


def test_jump_host_is_the_only_way_to_the_inner_name(lab: Lab) -> None:
    assert lab.ssh("pve-jump", "hostname").stdout == b"pve\n"
    straight = lab.ssh("pve-jump", "hostname", options=["-o", "ProxyJump=none"])
    assert straight.returncode == 255
    assert b"resolve" in straight.stderr


def test_rc_file_of_root_is_read_and_may_make_noise(lab: Lab) -> None:
    lab.bashrc("echo welcome; echo careful >&2; export PATH=/usr/bin:/bin:/opt/own")
    done = lab.ssh("pve", "echo $PATH")
    assert done.stdout == b"welcome\n/usr/bin:/bin:/opt/own\n"
    assert done.stderr == b"careful\n"


def test_terminal_merges_the_streams_and_hangs_up_what_runs(lab: Lab, ct: Container) -> None:
    script = "echo out; echo err >&2; touch /workspace/started; sleep 60"
    command = lab.ssh_command("pve", f"pct exec {ct.vmid} -- sh -c '{script}'", options=["-tt"])
    with lab.background(command) as client:
        assert client.stdout is not None
        lines = [client.stdout.readline() for _ in range(2)]
        assert [line.rstrip() for line in lines] == [b"out", b"err"]
        assert all(line.endswith(b"\r\n") for line in lines)  # Even \r\r\n: sshd and lxc-attach have a terminal each.
        client.kill()
    wait_until(lambda: set(ct.processes()) == {1}, "the hang-up to end the script")


def test_user_without_root_needs_sudo(lab: Lab, ct: Container) -> None:
    command = f"/usr/sbin/pct exec {ct.vmid} -- id -u"
    refused = lab.ssh("pve-user", command)
    assert refused.returncode == 255
    assert refused.stderr.startswith(b"ipcc_send_rec[1] failed: Unknown error -1\n")
    assert lab.ssh("pve-user", f"sudo -n {command}").returncode == 127
    lab.sudo("password")
    assert b"password is required" in lab.ssh("pve-user", f"sudo -n {command}").stderr
    lab.sudo("allowed")
    assert lab.ssh("pve-user", f"sudo -n {command}").stdout == b"0\n"


def test_process_inside_outlives_a_cut_link(lab: Lab, ct: Container, link: Link) -> None:
    script = "touch /workspace/started; sleep 60 >/dev/null"
    command = lab.ssh_command("pve-link", f"pct exec {ct.vmid} -- sh -c '{script}'")
    with lab.background(command) as client:
        wait_until((ct.workspace / "started").exists, "the command to run")
        assert link.num_connections() == 1
        assert link.cut() == 1
        assert client.wait(timeout=5) == 255
    assert any("sleep" in line for line in ct.processes().values())
    assert lab.ssh("pve-link", "echo back").stdout == b"back\n"


def test_stalled_link_is_silent_until_the_client_asks(lab: Lab, link: Link) -> None:
    command = lab.ssh_command("pve-link", "echo up; cat", options=ALIVE)
    with lab.background(command, stdin=subprocess.PIPE) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == b"up\n"
        link.stall()
        client.stdin.write(b"held\n")
        client.stdin.flush()
        assert client.poll() is None
        link.resume()
        assert client.stdout.readline() == b"held\n"
        link.stall()
        assert client.wait(timeout=10) == 255


def test_stopped_sshd_is_a_dead_peer(lab: Lab) -> None:
    command = lab.ssh_command("pve", "echo up; sleep 60", options=ALIVE)
    with lab.background(command) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"up\n"
        lab.freeze_sshd_sessions()
        assert client.wait(timeout=10) == 255
    assert lab.ssh("pve", "echo fine").stdout == b"fine\n"


def test_slow_connection_still_connects(lab: Lab, link: Link) -> None:
    link.delay_s = 0.5
    assert lab.ssh("pve-link", "echo x").stdout == b"x\n"
