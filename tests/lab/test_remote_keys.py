"""Which host keys are believed and which keys of the user's are offered, through a real sshd and a real agent."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit.deadline import wait_until
from labkit.lab import Lab
from labkit.laptop import point, ssh_config


@pytest.fixture
def configured(bench, lab: Lab, ct):
    """Puts options in front of the lab's own ssh configuration, which is included below them."""

    def configure(*options: str) -> None:
        point(bench, lab)
        path = bench.folder / "ssh config"
        path.write_text("\n".join(["Host pve", *options, "Host *", f"Include {lab.ssh_config}", ""]))
        ssh_config(bench, path)

    return configure


def keys(lab: Lab, *names: str, mark: str = "") -> str:
    """Lines of known_hosts that give the hypervisor these keys of the lab's."""
    place = f"[127.0.0.1]:{lab.ports.pve}"
    found = [(lab.directory / f"ssh/{name}.pub").read_text().split()[:2] for name in names]
    return "".join(f"{mark}{place} {kind} {blob}\n" for kind, blob in found)


def known(bench, text: str) -> str:
    path = bench.folder / "known"
    path.write_text(text)
    return f"UserKnownHostsFile {path}"


@pytest.mark.parametrize("order", [("host_pve", "host_nobody"), ("host_nobody", "host_pve")], ids=" ".join)
def test_each_of_two_keys_of_one_type_is_believed(bench, lab, configured, order) -> None:
    configured(known(bench, keys(lab, *order)))
    done = bench("deploy")
    assert done.exit_code == 0, done.stderr


def test_a_key_that_is_none_of_those_known_is_refused(bench, lab, configured) -> None:
    configured(known(bench, keys(lab, "host_nobody", "host_jump")))
    done = bench("deploy")
    assert (done.exit_code, "not the one in known_hosts" in done.stderr) == (4, True)
    assert lab.pct.calls() == []


@pytest.mark.parametrize("policy", ["yes", "accept-new"])
def test_a_revoked_key_is_refused_even_where_another_line_knows_it(bench, lab, configured, policy: str) -> None:
    lines = keys(lab, "host_pve", mark="@revoked ") + keys(lab, "host_pve")
    configured(known(bench, lines), f"StrictHostKeyChecking {policy}")
    done = bench("deploy")
    assert (done.exit_code, "is revoked" in done.stderr) == (4, True)
    assert lab.pct.calls() == []


def test_accept_new_without_a_memory_is_no_acceptance(bench, lab, configured) -> None:
    configured("UserKnownHostsFile /dev/null", "StrictHostKeyChecking accept-new")
    done = bench("deploy")
    assert (done.exit_code, "host key is unknown" in done.stderr) == (4, True)
    assert lab.pct.calls() == []


@pytest.fixture
def agent(bench, lab: Lab) -> Iterator[Path]:
    """An ssh-agent with eight keys that open nothing, and behind them the one that does."""
    socket = bench.folder / "agent"
    bench.env["SSH_AUTH_SOCK"] = str(socket)
    with lab.background(["ssh-agent", "-D", "-a", str(socket)]):
        wait_until(socket.exists, "the agent")
        decoys = [bench.folder / f"decoy{number}" for number in range(8)]
        for decoy in decoys:
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", decoy], check=True, timeout=20)
        environment = {**os.environ, "SSH_AUTH_SOCK": str(socket)}
        own = lab.directory / "ssh/id_ed25519"
        subprocess.run(["ssh-add", "-q", *decoys, own], env=environment, check=True, timeout=20, stderr=subprocess.DEVNULL)
        yield own


@pytest.mark.parametrize("named", ["id.pub", "id"])
def test_of_an_agent_with_many_keys_the_named_one_is_offered(bench, lab, configured, agent: Path, named: str) -> None:
    shutil.copy(f"{agent}.pub", bench.folder / "id.pub")
    configured(f"IdentityFile '{bench.folder / named}'")
    text = lab.ssh_config.read_text()
    bare = bench.folder / "bare"
    bare.write_text("\n".join(line for line in text.splitlines() if "IdentityFile" not in line))
    path = bench.folder / "ssh config"
    path.write_text(path.read_text().replace(str(lab.ssh_config), str(bare)))
    done = bench("deploy")
    assert done.exit_code == 0, done.stderr


def test_a_server_that_takes_no_key_says_which_were_tried(bench, lab, configured) -> None:
    key = bench.folder / "wrong"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=20)
    configured(f"IdentityFile '{key}'")
    bare = bench.folder / "bare"
    bare.write_text("\n".join(line for line in lab.ssh_config.read_text().splitlines() if "IdentityFile" not in line))
    path = bench.folder / "ssh config"
    path.write_text(path.read_text().replace(str(lab.ssh_config), str(bare)))
    done = bench("deploy")
    assert (done.exit_code, f"access denied with {key}" in done.stderr) == (4, True)
