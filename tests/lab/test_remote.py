"""dflashctl through a real sshd and `pct` into a real container: what crosses, what is refused and with which words."""

import json
import os
import signal
import subprocess
import sys

import pytest
from labkit.container import Options
from labkit.deadline import wait_until
from labkit.laptop import COUNTER, SLEEPER, following, launch, point
from labkit.smi import IDLE_H200_PAIR


def text_of(ct, path: str) -> str:
    done = ct.run(["cat", path])
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_the_whole_loop(far, lab, ct) -> None:
    far.trainer("import time; print('from inside', flush=True); time.sleep(1.5); print('done')")
    deployed = far("deploy", "ct200", "--json").document
    assert deployed["uploaded_bytes"] > 0
    done = launch(far)
    assert done.exit_code == 0, done.stderr
    assert done.document["host"] == "ct200"
    assert far("tail").stdout == "from inside\ndone\n"
    assert far("status", "--json").document["state"] == "exited"
    assert far("runs").stdout.startswith("quick-1\tct200\t")
    assert text_of(ct, "/workspace/my runs/train_quick.log") == "from inside\ndone\n"
    assert "nothing to do" in far("deploy").stdout


def test_two_hosts_over_ssh_side_by_side(bench, lab, ct) -> None:
    point(bench, lab)
    hosts = bench.folder / "hosts.yaml"
    hosts.write_text(f"{hosts.read_text()}  plain: {{ssh: pve, root: '{bench.folder}/far', python: '{sys.executable}'}}\n")
    bench.trainer(SLEEPER)
    assert bench("deploy", "--all").exit_code == 0
    for host in ("ct200", "plain"):
        assert launch(bench, "--host", host).exit_code == 0
    ct.crash()
    done = bench("status", "--all", "--json")
    assert done.exit_code == 5
    assert [row["error"] and row["error"]["code"] for row in done.document["hosts"]] == ["container", None]
    done = bench("stop", "--all", "--yes")
    assert done.exit_code == 5
    assert done.stdout == "plain: quick-1 stopped\n"
    assert "ct200: error: host ct200: container 200 is stopped" in done.stderr


def test_deploy_and_launch_need_at_most_four_round_trips(far, lab, ct) -> None:
    far.experiment("cuda", "cuda:0")
    lab.smi_in(ct).install()
    far("deploy")
    lab.pct.reset()
    far("deploy")
    assert far("launch", "--tag", "cuda", "--startup-seconds", "20").exit_code == 0
    assert 1 <= len([call for call in lab.pct.calls() if call[0] == "exec"]) <= 4


@pytest.mark.parametrize(
    "value", ['it\'s "$HOME" `x` \\ * ? [a] !', "two\nlines\n", "ünïcode ✓ \t tab", "-n", "%s {} ;&|<>"], ids=repr
)
def test_values_arrive_unchanged(far, lab, value: str) -> None:
    point(far, lab, env=f"{{GREETING: {json.dumps(value)}}}")
    far.trainer("import os, json; print(json.dumps(os.environ['GREETING']))")
    log = launch(far, seconds="20")
    assert log.exit_code == 0, log.stderr
    assert json.loads(far("tail", "--no-follow").stdout) == value


def test_noise_of_rc_files_and_perl_is_cut_away(far, lab) -> None:
    lab.bashrc("echo welcome to pve; echo 'motd {\"schema\": 7}' >&2\ntrap 'echo bye' EXIT\n")
    lab.pct.says_first("perl: warning: Setting locale failed.\n")
    assert far("deploy", "--json").exit_code == 0
    assert launch(far, seconds="20").document["state"] == "exited"


@pytest.mark.parametrize("status", [255, 25, 2])
def test_container_states_are_told_apart_whatever_the_exit_code(bench, lab, ct, status: int) -> None:
    lab.pct.dies_with(status)
    point(bench, lab)
    ct.stop()
    stopped = bench("deploy")
    assert (stopped.exit_code, "container 200 is stopped" in stopped.stderr, "pct start 200" in stopped.stderr) == (
        5,
        True,
        True,
    )
    point(bench, lab, vmid=999)
    unknown = bench("deploy")
    assert (unknown.exit_code, "there is no container 999" in unknown.stderr) == (5, True)
    point(bench, lab, vmid=300)
    elsewhere = bench("deploy")
    assert (elsewhere.exit_code, "lives on another node of the cluster, pve2" in elsewhere.stderr) == (5, True)


def test_a_frozen_container_is_said_and_starts_nothing_when_it_thaws(far, lab, ct) -> None:
    far.trainer(SLEEPER)
    far("deploy")
    ct.freeze()
    done = far("launch", "--tag", "quick")
    assert done.exit_code == 5
    assert "container 200 is frozen" in done.stderr
    ct.unfreeze()
    far.until(lambda: far("deploy").exit_code == 0)
    inside = ct.run(["ls", "/workspace/my runs"], check=True).stdout.decode().split()
    assert "releases" in inside
    assert "runs" not in inside


@pytest.mark.parametrize(
    ("policy", "code", "text"),
    [("absent", 5, "there is no sudo"), ("password", 5, "sudo asks for a password"), ("allowed", 0, "is active")],
)
def test_a_user_who_is_not_root(bench, lab, ct, policy: str, code: int, text: str) -> None:
    point(bench, lab, alias="pve-user")
    lab.sudo(policy)
    done = bench("deploy")
    assert done.exit_code == code, done.stderr
    assert text in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("alias", "text"),
    [
        ("pve-wrong-key", "host key is not the one in known_hosts"),
        ("pve-unknown-key", "host key is unknown"),
        ("pve-unchecked", "StrictHostKeyChecking no"),
        ("no-such-alias.invalid", "no such name"),
    ],
)
def test_host_keys_are_always_checked(bench, lab, ct, alias: str, text: str) -> None:
    point(bench, lab, alias=alias)
    done = bench("deploy", "--json")
    assert done.exit_code == 4
    assert text in done.document["error"]["message"]
    assert lab.pct.calls() == []


def test_accept_new_writes_the_key_down_and_then_holds_it(bench, lab, ct) -> None:
    known = lab.directory / "ssh/known_hosts_new"
    point(bench, lab, alias="pve-accept-new")
    assert bench("deploy").exit_code == 0
    assert known.read_text().count("ssh-ed25519") == 1
    assert bench("deploy").exit_code == 0
    assert known.read_text().count("ssh-ed25519") == 1
    known.write_text((lab.directory / "ssh/known_hosts_wrong").read_text())
    assert bench("deploy").exit_code == 4


def test_a_jump_host(bench, lab, ct) -> None:
    point(bench, lab, alias="pve-jump")
    assert bench("deploy").exit_code == 0


def test_a_host_without_a_container(bench, lab) -> None:
    point(bench, lab, vmid=None)
    done = bench("gpus", "--json")
    assert done.exit_code == 0
    assert done.document["hosts"][0]["gpus"] == []


def test_the_gpus_of_the_hypervisor_itself(bench, lab) -> None:
    point(bench, lab, vmid=None)
    lab.smi.install()
    lab.smi.apps(
        "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-4d900621-81f0-00be-a4f9-408f47134ea1, 1, x, 500 MiB\n"
    )
    done = bench("gpus", "--json")
    assert done.exit_code == 0
    assert [gpu["state"] for gpu in done.document["hosts"][0]["gpus"]] == ["busy", "idle"]


def test_who_holds_a_gpu_is_asked_of_the_hypervisor(far, lab, ct) -> None:
    """Container 201 computes on GPU 0; in 200 the driver shows its memory and nobody that holds it."""
    lab.smi_in(ct).install()
    busy = IDLE_H200_PAIR.replace("143771 MiB, 0 MiB", "143771 MiB, 72704 MiB", 1)
    lab.smi_in(ct).gpus(busy)
    other = lab.container(201)
    other.start_job("exec sleep 600")
    inner = process_in(other, "sleep")
    outer = other.pid_on_node(inner)
    lab.smi.install()
    lab.smi.gpus(busy)
    first = "GPU-4d900621-81f0-00be-a4f9-408f47134ea1"
    lab.smi.apps(f"gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n{first}, {outer}, sleep, 72704 MiB\n")
    rows = far("gpus", "--json").document["hosts"][0]["gpus"]
    assert [row["state"] for row in rows] == ["busy", "idle"]
    assert f"held by container 201, pid {inner} (sleep 600, 72704 MiB)" in rows[0]["reason"]
    far.experiment("cuda", "cuda:0")
    refused = far("launch", "--tag", "cuda", "--gpus", "0")
    assert refused.exit_code == 6
    assert f"container 201, pid {inner}" in refused.stderr


@pytest.mark.parametrize("user", ["root", "labuser"])
def test_a_lease_of_another_container_is_seen_from_the_hypervisor(far, lab, ct, user: str) -> None:
    if user == "labuser":
        lab.sudo("allowed")
        point(far, lab, alias="pve-user")
    lab.smi_in(ct).install()
    lab.smi.install()
    other = lab.container(201)
    uuid = "GPU-7694f615-a85b-389a-8e1f-80f0505d3c36"
    note = {"run": "quick-9", "by": "ann@laptop", "since": "2026-11-29T10:00:00Z"}
    lease = f"/workspace/leases/{uuid}"
    other.write(lease, json.dumps(note))
    other.start_job(f"exec flock -F {lease} sleep 600")
    lab_sees = lambda: far("gpus", "--json").document["hosts"][0]["gpus"][1]  # noqa: E731
    far.until(lambda: lab_sees()["state"] == "busy")
    assert "held by run quick-9 of ann@laptop since 2026-11-29T10:00:00Z in container 201" in lab_sees()["reason"]
    far.experiment("cuda", "cuda:0")
    assert far("launch", "--tag", "cuda", "--gpus", "1").exit_code == 6
    assert far("launch", "--tag", "cuda", "--gpus", "0", "--startup-seconds", "0").exit_code == 0


def test_a_hypervisor_that_cannot_be_asked_is_said(far, lab, ct) -> None:
    lab.smi_in(ct).install()
    lab.smi.install()
    lab.smi.says("Failed to initialize NVML: Unknown Error", status=255)
    document = far("gpus", "--json").document["hosts"][0]
    assert [gpu["state"] for gpu in document["gpus"]] == ["idle", "idle"]
    assert "who is at them from other containers is not known" in document["note"]
    far.experiment("cuda", "cuda:0")
    done = far("launch", "--tag", "cuda", "--startup-seconds", "0")
    assert (done.exit_code, "warning: who else is at them is not known" in done.stderr) == (0, True)


def process_in(container, name: str) -> int:
    """The pid inside of a process that was started there."""

    def named() -> list[int]:  # not the shell that becomes it, nor in one look what another has seen
        return [pid for pid, line in container.processes().items() if line.split()[:1] == [name]]

    (inner,) = wait_until(named, f"{name} in the container")
    return inner


def test_a_hanging_nvidia_smi_is_unknown_in_time(far, lab, ct) -> None:
    far.experiment("cuda", "cuda:0")
    smi = lab.smi_in(ct)
    smi.install()
    smi.hangs(60)
    done = far("gpus", "--json", timeout=60)
    assert done.exit_code == 7
    assert "timed out" in done.document["hosts"][0]["error"]


def test_a_dead_peer_is_noticed_and_tail_goes_on(far, lab, ct) -> None:
    far.trainer(COUNTER)
    launch(far)
    with following(far) as process:
        lab.freeze_sshd_sessions()
        ct.write("/workspace/go", "")
        _, stderr = process.communicate(timeout=90)
    assert process.returncode == 0
    assert b"stopped answering" in stderr
    assert b"connecting again" in stderr


def test_tail_over_a_cut_link_loses_no_line(bench, lab, link, ct) -> None:
    point(bench, lab, alias="pve-link")
    bench.trainer(COUNTER)
    launch(bench)
    with following(bench) as process:
        assert link.cut() == 1
        ct.write("/workspace/go", "")
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert stdout == b"".join(b"line %d\n" % i for i in range(2000)) + b"end\n"
    assert b"connecting again" in stderr


def test_tail_gives_up_on_a_host_that_was_never_there(bench, lab, link, ct) -> None:
    point(bench, lab, alias="pve-link")
    launch(bench)
    link.refuse()
    done = bench("tail", "quick-1")
    assert done.exit_code == 4
    status = bench("status", "quick-1", "--json")
    assert (status.exit_code, status.document["state"], status.document["exit_code"]) == (4, "unknown", None)


def test_a_silent_run_is_not_taken_for_a_dead_peer(far, lab, ct) -> None:
    far.trainer(COUNTER)
    launch(far)
    with following(far) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=25)  # longer than a keepalive may take, and than one look waits
        ct.write("/workspace/go", "")
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"connecting again" not in stderr


def test_a_run_outlives_a_killed_client_and_a_cut_link(bench, lab, link, ct) -> None:
    point(bench, lab, alias="pve-link")
    bench.trainer(f"import signal, sys; signal.signal(signal.SIGHUP, lambda *_: sys.exit('hangup'))\n{SLEEPER}")
    bench("deploy")
    process = bench.start("launch", "--tag", "quick", "--startup-seconds", "30")
    bench.until(lambda: ct.run(["cat", "/workspace/my runs/train_quick.log"]).stdout == b"up\n")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)
    link.cut()
    assert bench("status", "ct200:quick-1", "--json").document["state"] == "running"
    assert bench("stop", "quick-1").exit_code == 0


def test_ctrl_c_in_tail_leaves_no_process_behind(far, lab, ct) -> None:
    far.trainer(SLEEPER)
    launch(far)
    before = len(ct.processes())
    with following(far) as process:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    far.until(lambda: len(ct.processes()) <= before, 10)


def test_a_killed_container_is_lost(far, lab, ct) -> None:
    far.trainer(SLEEPER)
    launch(far)
    with following(far) as process:
        ct.crash()
        _, stderr = process.communicate(timeout=90)
    assert process.returncode == 1
    assert b"lost" in stderr
    for restart in (False, True):
        if restart:
            ct.start()
        done = far("status", "--json")
        assert (done.exit_code, done.document["state"], done.document["exit_code"]) == (0, "lost", None)
        assert far("stop", "quick-1").exit_code == 0
        assert "lost" in far("status").stdout


def test_a_full_disk_leaves_the_old_release_active(bench, lab) -> None:
    ct = lab.container_with_python(200, Options(workspace_mib=1))
    point(bench, lab)
    good = bench("deploy", "--json").document["release"]
    bench.trainer("x = '" + "y" * 3_000_000 + "'", "large.py")
    done = bench("deploy", "--json")
    assert done.exit_code == 8
    assert "is full" in done.document["error"]["message"]
    assert ct.run(["readlink", "/workspace/my runs/current"]).stdout.decode().strip() == f"releases/{good}"


def test_an_out_of_memory_kill_is_told_from_any_other(bench, lab) -> None:
    ct = lab.container_with_python(200, Options(memory_mib=200))
    point(bench, lab)
    bench.trainer("print('eating', flush=True)\nx = bytearray(600_000_000)")
    done = launch(bench, seconds="30")
    assert done.exit_code == 9
    assert ct.oom_kills() >= 1
    state = bench("status", "quick-1", "--json").document
    assert (state["state"], state["signal"], state["exit_code"]) == ("killed", 9, 137)
    assert state["oom_kills"] >= 1
    assert "out of memory" in done.stderr + done.document["error"]["message"]
    assert "out of memory" in bench("status", "quick-1").stdout
    bench.trainer("import os; os.kill(os.getpid(), 9)")
    assert launch(bench, seconds="30").exit_code == 9
    killed = bench("status", "quick-2")
    assert "killed by signal 9" in killed.stdout
    assert "out of memory" not in killed.stdout  # 137 alone says nothing about memory


@pytest.mark.parametrize(("python", "text"), [("/usr/bin/nopython", "no interpreter"), ("/bin/false", "/bin/false failed")])
def test_a_wrong_interpreter(bench, lab, ct, python: str, text: str) -> None:
    point(bench, lab, python=python)
    done = bench("deploy")
    assert done.exit_code == 8
    assert text in done.stderr


def test_a_host_that_never_stops_talking_is_given_up(far, lab, ct) -> None:
    ct.write("/workspace/python", "#!/bin/sh\nexec yes noise\n", mode=0o755)
    point(far, lab, python="/workspace/python")
    done = far("deploy")
    assert (done.exit_code, "sent more than 64 MiB" in done.stderr) == (4, True)


def test_megabytes_on_both_streams(far, lab, ct) -> None:
    far.trainer("import sys\nsys.stderr.write('e' * 6_000_000)\nsys.stdout.write('o' * 6_000_000 + '\\n')")
    assert launch(far, "--follow", seconds="0").document["exit_code"] == 0


def test_the_real_trainer_trains_inside_the_container(far, lab, ct, tiny_run) -> None:
    for path in sorted(tiny_run.root.rglob("*")):
        if path.is_file():
            inside = ct.path(f"/workspace/my runs/{path.relative_to(tiny_run.root)}")
            ct.run(["mkdir", "-p", f"/workspace/my runs/{path.parent.relative_to(tiny_run.root)}"], check=True)
            inside.write_bytes(path.read_bytes())
    trainer = tiny_run.config(run={"steps": 2})
    del trainer["run"]["root"]
    (far.folder / "experiments/tiny.yaml").write_text(json.dumps({"hypothesis": "it trains", "trainer": trainer}))
    del far.env["DFLASHCTL_TRAINER"]
    done = far("launch", "--tag", "tiny", "--startup-seconds", "0", "--follow", timeout=300)
    assert done.exit_code == 0, done.stderr + done.stdout
    assert "step 2/2" in done.stdout
    state = far("status", "--json").document
    assert (state["state"], state["exit_code"], state["step"], state["last_event"]) == ("exited", 0, 2, "finished")
    checkpoint = ct.path("/workspace/my runs/runs/tiny-1/checkpoints/step-2")
    assert {path.name for path in checkpoint.iterdir()} == {"config.json", "model.safetensors"}


def test_programs_in_usr_local_are_found(far, lab, ct) -> None:
    smi = lab.smi_in(ct)
    smi.install("/usr/local/bin")
    assert [gpu["state"] for gpu in far("gpus", "--json").document["hosts"][0]["gpus"]] == ["idle", "idle"]


def test_a_release_of_a_broken_file_stays_out(far, lab, ct) -> None:
    good = far("deploy", "--json").document["release"]
    far.trainer("def broken(:", "bad.py")
    done = far("deploy", "--json")
    assert done.exit_code == 8
    assert done.document["parse_check"]["errors"][0].startswith("trainer/bad.py:1: ")
    assert ct.run(["readlink", "/workspace/my runs/current"]).stdout.decode().strip() == f"releases/{good}"
