"""`dflashctl doctor` through sshd and `pct`: what is wrong with a container is said, and nothing there is changed."""

import sys

import pytest
from labkit.laptop import point


def examined(bench, code: int) -> dict[str, dict[str, str]]:
    done = bench("doctor", "ct200", "--json")
    assert done.exit_code == code, done.stdout + done.stderr
    return {check["name"]: check for check in done.document["hosts"][0]["checks"]}


def test_a_container_that_is_well_whatever_its_shell_says(far, lab, ct) -> None:
    lab.bashrc("echo noise; echo more >&2\n")
    lab.pct.says_first("perl: warning: Setting locale failed.\n")
    checks = examined(far, 0)
    assert list(checks)[:4] == ["ssh", "container", "interpreter", "gpus"]
    assert checks["ssh"]["command"] == "ssh pve true"
    assert "its host key is the one in known_hosts" in checks["ssh"]["found"]
    assert checks["container"]["command"] == "ssh pve /usr/sbin/pct exec 200 -- true"
    assert not [check for check in checks.values() if check["state"] in ("failed", "unknown")]
    lab.smi_in(ct).install()
    check = examined(far, 8)["torch"]  # whose torch is a CPU build
    assert "CUDA does not start: Torch not compiled with CUDA enabled" in check["found"]
    assert "CPU build" in check["fix"]


@pytest.mark.parametrize("python", ["/usr/bin/python3.99", "/opt/venv/bin/python"])
def test_a_python_in_usr_local_is_found_though_pct_has_no_path_to_it(bench, lab, ct, python: str) -> None:
    point(bench, lab, python=python)
    ct.write("/usr/local/bin/python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n', 0o755)
    check = examined(bench, 8)["interpreter"]
    assert check["state"] == "failed"
    assert "set hosts.ct200.python to /usr/local/bin/python3, which is 3." in check["fix"]


def test_no_way_in_is_a_check_that_failed(bench, lab, ct) -> None:
    point(bench, lab)
    ct.stop()
    checks = examined(bench, 5)
    assert [(name, check["state"]) for name, check in checks.items()] == [("ssh", "ok"), ("container", "failed")]
    assert checks["container"]["fix"] == "on pve: pct start 200"
    point(bench, lab, alias="pve-wrong-key")
    checks = examined(bench, 4)
    assert list(checks) == ["ssh"]
