"""Faults that people met with ssh, pct and shells, each as the smallest thing of its kind that our command line could meet."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from labkit.laptop import SLEEPER, launch, point, ssh_config

from dflashctl.container import Gateway
from dflashctl.errors import RemoteTimeoutError
from dflashctl.hosts import Container, load_hosts
from dflashctl.session import open_session


def test_a_loop_over_hosts_keeps_its_stdin(far, lab, ct) -> None:
    """`while read host` with our command in its body: a command that reads stdin would eat the other lines."""
    launch(far)
    loop = f'while read host; do "{far.executable}" status "$host:quick-1"; done'
    done = subprocess.run(
        ["sh", "-c", loop], input="ct200\n" * 3, text=True, cwd=far.folder, env=far.env, capture_output=True, timeout=60
    )
    assert done.stdout.count("ct200:quick-1 ") == 3, done.stderr


@pytest.mark.parametrize("closed", ["<&-", "<&- >/dev/null 2>&-", "</dev/full"])
def test_a_closed_stdin_is_no_accident(far, lab, ct, closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "{far.executable}" deploy {closed}'], cwd=far.folder, env=far.env, capture_output=True, timeout=60
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)


def test_what_the_login_shell_reads_are_plain_words(far, lab, ct) -> None:
    """fish, zsh and sh agree on words without quotes inside quotes; pct is given a list that none of them has touched."""
    words = Gateway(Container(kind="proxmox", id=200), "root").words()
    assert all(re.fullmatch(r"[A-Za-z0-9/.-]+", word) for word in words)
    far("deploy")
    for call in lab.pct.calls():
        *plain, script = call
        assert plain[0] == "exec"
        assert all(re.fullmatch(r"[A-Za-z0-9/.-]+", word) for word in plain), plain
        assert not re.search(r"['\\]", script)
    assert lab.pct.calls()


def test_from_a_folder_and_into_a_root_with_spaces_and_parentheses(bench, lab, ct) -> None:
    home = bench.folder / "My Drive (1)"
    home.mkdir()
    for name in ("experiments", "mytrainer"):
        shutil.move(bench.folder / name, home / name)
    point(bench, lab)
    text = (bench.folder / "hosts.yaml").read_text().replace("/workspace/my runs", "/workspace/my 'runs' (2)")
    (home / "hosts.yaml").write_text(text)
    bench.folder, tools = home, bench.folder
    bench.env["DFLASHCTL_TRAINER"] = str(home / "mytrainer")
    done = launch(bench, seconds="30")
    assert done.exit_code == 0, done.stderr
    assert done.document["log"].startswith("/workspace/my 'runs' (2)/runs/quick-1/")
    assert tools.exists()


def test_proxyjump_none_overrides_a_jump_for_all(bench, lab, ct) -> None:
    point(bench, lab)
    path = bench.folder / "ssh config"
    more = f"Host *\nInclude {lab.ssh_config}\n"
    path.write_text(f"Host pve\n ProxyJump none\nHost p*\n ProxyJump nowhere.invalid\n{more}")
    ssh_config(bench, path)
    assert bench("deploy").exit_code == 0
    path.write_text(f"Host p*\n ProxyJump nowhere.invalid\n{more}")
    assert bench("deploy").exit_code == 4


def test_a_slow_connection_is_no_dead_host(bench, lab, link, ct) -> None:
    point(bench, lab, alias="pve-link")
    bench.trainer(SLEEPER)
    assert launch(bench).exit_code == 0
    link.delay_s = 8
    state = bench("status", "quick-1", "--json").document
    assert state["state"] == "running"


def test_an_exit_code_of_255_is_the_trainers_and_no_lost_connection(far, lab, ct) -> None:
    far.trainer("import sys; sys.exit(255)")
    done = launch(far, seconds="30")
    assert done.exit_code == 9
    assert far("status", "--json").document["exit_code"] == 255
    assert far("tail").exit_code == 1


def test_a_container_whose_config_is_locked_still_answers(far, lab, ct) -> None:
    """A push of somebody else's holds the lock; what we use does not want it."""
    lab.pct.copies_take(20)
    with lab.background(lab.ssh_command("pve", "echo x >/run/x && /usr/sbin/pct push 200 /run/x /root/x")):
        far.until(lambda: any(call[0] == "push" for call in lab.pct.calls()))
        assert far("deploy").exit_code == 0


def test_no_way_into_the_container_but_exec_is_used(far, lab, ct) -> None:
    """`push` ends with 0 when the disk is full, and `status` calls a frozen container running."""
    far.trainer(SLEEPER)
    launch(far)
    for command in (("gpus",), ("status",), ("tail", "--no-follow"), ("runs", "--refresh"), ("stop", "quick-1")):
        assert far(*command).exit_code == 0
    assert {call[0] for call in lab.pct.calls()} == {"exec"}
    assert all(len(call) > 4 for call in lab.pct.calls())  # never without a command


def test_a_process_stuck_in_the_kernel_is_named_and_stop_ends(far, lab, ct) -> None:
    """A frozen process shows state D and does not hear SIGKILL, as one does that waits for a driver."""
    if lab.is_cgroup_v2:
        pytest.skip("cgroup v2 kills frozen processes: a stuck one cannot be made here")
    far.trainer(SLEEPER)
    launch(far)
    (inner,) = far.until(lambda: [pid for pid, line in ct.processes().items() if "-m trainer" in line])
    with ct.stuck(inner):
        done = far("stop", "quick-1", "--grace", "1", "--json")
        assert done.exit_code == 11
        assert [p["pid"] for p in done.document["survivors"]] == [inner]
        assert f"pid {inner} (python3, state D)" in done.document["error"]["message"]
        assert "reset" in done.document["error"]["hint"]
    far.until(lambda: inner not in ct.processes())
    assert far("stop", "quick-1").exit_code == 0


def test_a_call_that_outlives_its_time_leaves_nothing_inside(far, lab, ct, monkeypatch) -> None:
    monkeypatch.setenv("PATH", far.env["PATH"])
    host = load_hosts({"DFLASHCTL_HOSTS": str(far.folder / "hosts.yaml")}, far.folder).get("ct200")
    with open_session(host) as session, pytest.raises(RemoteTimeoutError):
        session.script("sleep 300 & exec sleep 300", timeout_s=2)
    far.until(lambda: set(ct.processes()) == {1})


def test_nothing_of_ours_searches_processes_by_name() -> None:
    """`pgrep -f` over ssh finds its own shell. The one that the doctor shows has a pattern that does not match itself."""
    package = Path(__file__).parents[2] / "dflashctl"
    lines = [line for path in package.rglob("*.py") for line in path.read_text().splitlines()]
    assert len(lines) > 2000
    assert not [line for line in lines if re.search(r"\b(pkill|killall|pidof)\b", line)]
    for line in lines:
        if found := re.search(r"\bpgrep\b.*?'(.*?)'", line):
            assert all("[" in part for part in found[1].split("|")), line
        else:
            assert "pgrep" not in line


def test_the_home_of_a_user_with_a_long_path_needs_no_socket(bench, lab, ct) -> None:
    """A control socket's path must be short; there is none."""
    home = bench.folder / ("h" * 100) / ("o" * 100)
    home.mkdir(parents=True)
    bench.env["HOME"] = str(home)
    point(bench, lab)
    assert bench("deploy").exit_code == 0
    assert not [path for path in home.rglob("*") if path.is_socket()]
    assert os.listdir(home) == []
