"""`dflashctl doctor`: a host that is well, and one for each thing that can be wrong with it."""

import fcntl
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from dflashctl.doctor import clock
from dflashctl.onhost import doctor as on_host

TORCH = """
import os, warnings
__version__ = "2.13.0"
class version: cuda = "13.0"
class Ones:
    def __matmul__(self, other): return self
    def sum(self): return self
    def item(self): return {value}
def ones(*shape, device): return Ones()
class cuda:
    @staticmethod
    def init():
        {init}
    @staticmethod
    def device_count(): return len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    @staticmethod
    def get_device_name(index): return os.environ["CUDA_VISIBLE_DEVICES"].split(",")[index]
"""
SMI = """
    case "$1" in --query-compute-apps=*) exit 0;; esac
    echo "index, uuid, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%]"
    echo "0, GPU-aaaa, NVIDIA H200, 9000, 143771, 50"
    echo "1, GPU-bbbb, NVIDIA H200, 0, 143771, 0"
"""


@pytest.fixture
def patient(bench):
    """A host whose torch is a few lines: the real one takes seconds to import, and works."""
    stub = bench.folder / "stub"
    stub.mkdir()
    (stub / "torch.py").write_text(TORCH.format(value=256**3, init="pass"))
    hosts(bench)
    return bench


def hosts(bench, python: str = sys.executable, root: str = ".dflash", more: str = "") -> None:
    env = f"{{PYTHONPATH: '{bench.folder}/stub', TMPDIR: '{bench.folder}', HOME: '{bench.folder}/home'}}"
    keys = f"transport: local, root: {root}, python: '{python}', env: {env}"
    bench.hosts(f"default: local\nhosts:\n  local: {{{keys}{more}}}\n")


def examined(bench, code: int = 0, *args: str) -> dict[str, dict[str, str]]:
    """The checks of one host by name."""
    done = bench("doctor", "--json", *args)
    assert done.exit_code == code, done.stdout + done.stderr
    (host,) = done.document["hosts"]
    assert host["error"] is None
    return {check["name"]: check for check in host["checks"]}


def test_a_host_that_is_well(patient) -> None:
    patient.nvidia_smi(SMI)
    before = sorted(patient.folder.rglob("*"))
    checks = examined(patient)
    well = "host interpreter gpus tools packages torch root disk inodes memory /dev/shm ports leases leftovers foreign caches"
    assert list(checks) == [*well.split(), "clock"]
    assert not [check for check in checks.values() if check["state"] in ("failed", "unknown")]
    assert all(check["command"] and check["found"] for check in checks.values())
    assert all(check["fix"] for check in checks.values() if check["state"] != "ok")
    assert sorted(patient.folder.rglob("*")) == before
    text = patient("doctor").stdout
    assert "ok       torch: torch 2.13.0 (CUDA 13.0) has computed on the idle ones, 1 of 2 GPUs (GPU-bbbb)\n" in text
    assert "           $ df -Pk -- " in text
    for name in ("torch 2.13", "transformers 5.", "triton ", "no NVIDIA driver", "fingerprint "):
        assert name in checks["packages"]["found"]


@pytest.mark.parametrize(
    ("value", "init", "text"),
    [
        (256**3, "raise RuntimeError('CUDA unknown error\\nmore')", "CUDA does not start: CUDA unknown error"),
        (256**3, "warnings.warn('driver too old'); raise RuntimeError('no driver')", "driver too old"),
        (7, "pass", "GPU-bbbb: 256 x 256 ones multiplied sum to 7"),
    ],
)
def test_nvidia_smi_is_content_and_cuda_is_not(patient, value: int, init: str, text: str) -> None:
    patient.nvidia_smi(SMI)
    (patient.folder / "stub/torch.py").write_text(TORCH.format(value=value, init=init))
    checks = examined(patient, 8)
    assert checks["gpus"]["state"] == "ok"
    assert checks["torch"]["state"] == "failed"
    assert text in checks["torch"]["found"]
    assert "nvidia-uvm" in checks["torch"]["fix"]


def test_a_torch_that_cannot_be_imported_or_crashes(patient) -> None:
    (patient.folder / "stub/torch.py").write_text("import os; os.write(2, b'libcudart.so.13: cannot open'); os.abort()")
    check = examined(patient, 8)["torch"]
    assert check["state"] == "failed"
    assert "libcudart.so.13: cannot open" in check["found"]


def test_gpus_that_cannot_be_read_are_7_and_a_busy_one_is_left_alone(patient) -> None:
    patient.nvidia_smi("echo 'Failed to initialize NVML: Unknown Error'; exit 255")
    checks = examined(patient, 7)
    assert checks["gpus"]["state"] == "failed"
    assert "restart the container" in checks["gpus"]["found"]
    patient.nvidia_smi(SMI.replace("0, 143771, 0", "500, 143771, 0"))
    (patient.folder / "stub/torch.py").write_text(TORCH.format(value=1, init="raise RuntimeError('touched')"))
    check = examined(patient)["torch"]
    assert check["state"] == "warning"
    assert "no GPU is idle" in check["found"]
    patient.nvidia_smi("echo 'No devices were found'; exit 6")
    hosts(patient, more=", gpus: [0]")
    assert "hosts.yaml names GPUs" in examined(patient, 7)["gpus"]["found"]


def test_a_wrong_interpreter_is_told_where_a_right_one_is(patient) -> None:
    old = patient.folder / "old python"
    old.write_text("#!/bin/sh\necho 3.6.9\n")
    old.chmod(0o755)
    (patient.folder / "bin/python3.12").symlink_to(sys.executable)
    for python, found in ((str(old), "is 3.6.9, the trainer needs 3.11"), ("/nowhere/python3", "does not run")):
        hosts(patient, python)
        checks = examined(patient, 8)
        assert checks["interpreter"]["state"] == "failed"
        assert found in checks["interpreter"]["found"]
        assert "set hosts.local.python to " in checks["interpreter"]["fix"]
        assert checks["disk"]["state"] in ("ok", "warning")  # the rest is looked at with another python
        assert "torch" not in checks


def test_packages_of_the_wrong_version_and_none_at_all(patient) -> None:
    for name, version in (("transformers", "5.20.1"), ("gguf", "0.1")):
        folder = patient.folder / f"stub/{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    check = examined(patient, 8)["packages"]
    assert check["state"] == "failed"
    assert "transformers must be <5.20,>=5.15, got 5.20.1" in check["found"]
    assert "gguf must be >=0.17, got 0.1" in check["found"]
    assert "dflashctl setup" in check["fix"]


@pytest.mark.parametrize(
    ("version", "wanted", "good"),
    [
        ("2.13.0+cu130", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("5.20.0", "<5.20,>=5.15", False),
        ("5.19.9", "<5.20,>=5.15", True),
        ("1.0", "==1.0.0", True),
        ("2.11.0rc1", ">=2.11", True),
        ("1.0", "~=1.0", False),
        ("odd", ">=1", False),
        (None, "", False),
    ],
)
def test_versions(version: str | None, wanted: str, good: bool) -> None:
    assert on_host.satisfies(version, wanted) is good


def seen_on(root: object) -> dict[str, dict[str, str]]:
    """The checks that need no interpreter of the trainer's, made in this process."""
    request = {"root": str(root), "python": None, "env": {}, "requirements": {}, "idle": [], "gpus": 0}
    return {check["name"]: check for check in on_host.examine(request)["checks"]}


def test_a_full_disk_no_inodes_and_a_read_only_root(patient, tmpfs) -> None:
    for options, name in (("size=8m", "disk"), ("size=3g,nr_inodes=50", "inodes"), ("size=3g,ro", "root")):
        checks = seen_on(tmpfs(options) / "root")
        assert {n for n in ("disk", "inodes", "root") if checks[n]["state"] == "failed"} == {name}
    assert "not writable" in checks["root"]["found"]
    hosts(patient, root=str(tmpfs("size=8m")))
    assert examined(patient, 8)["disk"]["found"] == "0.0 GiB free of 0.0 GiB"
    file = patient.folder / "file"
    file.touch()
    assert "is no folder" in seen_on(file)["root"]["found"]


def test_a_port_that_somebody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(on_host, "_PORT", port)
        check = seen_on(tmp_path)["ports"]
    assert check["state"] == "warning"
    assert f"{port} is held by pid {os.getpid()} (" in check["found"]
    assert "--standalone" in check["fix"]


def test_what_an_ended_run_left_is_named_and_stopped(patient) -> None:
    patient.trainer(
        """
        import subprocess, sys
        subprocess.Popen(["setsid", sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
        """
    )
    assert patient("launch", "--tag", "quick", "--startup-seconds", "30").exit_code == 0
    (pid,) = patient.marked("quick-1")
    check = seen_on(patient.root)["leftovers"]
    assert check["state"] == "warning"
    assert f"quick-1 has ended, but left pid {pid} (" in check["found"]
    assert check["fix"] == "dflashctl stop quick-1"
    assert patient("stop", "quick-1").exit_code == 0
    assert seen_on(patient.root)["leftovers"]["state"] == "ok"


def test_a_trainer_of_somebody_else_is_seen(patient) -> None:
    patient.trainer("import time; print('up', flush=True); time.sleep(600)")
    assert patient("launch", "--tag", "quick", "--startup-seconds", "0.3").exit_code == 0
    ours = [f"pid {pid} (" for pid in patient.until(lambda: patient.marked("quick-1"))]
    assert not any(pid in seen_on(patient.root)["foreign"]["found"] for pid in ours)
    check = seen_on(patient.folder / ".another")["foreign"]
    assert check["state"] == "warning"
    assert any(pid in check["found"] for pid in ours)


def test_leases_are_read_and_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    folder.mkdir()
    (folder / "GPU-free").write_text("{}")
    lease = folder / "GPU-dddd"
    for text, who in (
        (json.dumps({"run": "quick-7", "by": "ann@laptop", "since": "12:00"}), "run quick-7 of ann@laptop since 12:00"),
        ("[1", "a run"),
    ):
        lease.write_text(text)
        with lease.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert seen_on(tmp_path)["leases"]["found"] == f"held: GPU-dddd by {who}"
    assert seen_on(tmp_path)["leases"]["found"] == "no GPU is held by a run"


@pytest.mark.parametrize(
    ("theirs", "state", "text"),
    [
        (1005.0, "ok", "as this machine's"),
        (999.5, "ok", "as this machine's"),
        (1013.0, "ok", "3 s ahead of"),
        (4610.0, "warning", "3600 s ahead of"),
        (-2600.0, "warning", "3600 s behind"),
    ],
)
def test_clocks(theirs: float, state: str, text: str) -> None:
    check = clock(begun=1000.0, theirs=theirs, now=1010.0)
    assert (check.state, check.found.startswith(text)) == (state, True)


def test_a_host_that_is_not_there_is_a_failed_check_among_others(patient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    path = patient.folder / "hosts.yaml"
    path.write_text(f"{path.read_text()}  dead: {{ssh: nobody@127.0.0.1:{port}, root: /tmp/nowhere}}\n")
    done = patient("doctor", "--all", "--json")
    assert done.exit_code == 4
    well, dead = done.document["hosts"]
    assert len(well["checks"]) > 10
    assert [(check["name"], check["state"]) for check in dead["checks"]] == [("ssh", "failed")]
    assert dead["checks"][0]["command"] == f"ssh -p {port} nobody@127.0.0.1 true"
    assert {line.partition(": ")[0] for line in patient("doctor", "--all").stdout.splitlines()} == {"local", "dead"}
