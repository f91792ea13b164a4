"""The fake nvidia-smi answers queries as the real one prints them, on the node and in a container."""

import subprocess
import time

import pytest
from labkit.container import Container
from labkit.lab import Lab
from labkit.smi import FakeSmi, csv

SAMPLE = """\
# cmd: nvidia-smi --query-gpu=index,name,utilization.gpu --format=csv,noheader ; rc 0
0, NVIDIA A100, [GPU requires reset]
1, NVIDIA A100, 12 %
"""
MISMATCH = """\
# cmd: nvidia-smi (any arguments) ; rc 18 ; on STDOUT, stderr empty
Failed to initialize NVML: Driver/library version mismatch
NVML library version: 580.173
"""


@pytest.fixture
def smi(lab: Lab) -> FakeSmi:
    """Two idle cards on the hypervisor."""
    lab.smi.install()
    return lab.smi


def ask(lab: Lab, *words: str, timeout_s: float = 20) -> tuple[int, str]:
    """Run nvidia-smi on the node; gives status and stdout."""
    done = lab.node.run(["nvidia-smi", *words], timeout_s=timeout_s)
    return done.returncode, done.stdout.decode()


def test_columns_come_in_the_order_asked(lab: Lab, smi: FakeSmi) -> None:
    status, text = ask(lab, "--query-gpu=memory.used,index,name", "--format=csv")
    assert status == 0
    assert text == "memory.used [MiB], index, name\n0 MiB, 0, NVIDIA H200\n0 MiB, 1, NVIDIA H200\n"
    assert ask(lab, "--query-gpu=index,memory.total", "--format=csv,noheader,nounits")[1] == "0, 143771\n1, 143771\n"
    assert ask(lab, "--query-gpu=index", "--format=csv,noheader", "-i", "1")[1] == "1\n"
    assert smi.calls()[0] == "--query-gpu=memory.used,index,name --format=csv"


def test_unknown_field_is_an_error_on_stdout(lab: Lab, smi: FakeSmi) -> None:
    assert ask(lab, "--query-gpu=bogus", "--format=csv") == (2, 'Field "bogus" is not a valid field to query.\n\n')
    assert len(smi.calls()) == 1


def test_process_names_may_hold_commas(lab: Lab, smi: FakeSmi) -> None:
    smi.apps(csv("gpu_uuid, pid, process_name, used_gpu_memory [MiB]", ["GPU-1, 4711, python, a, b, 518 MiB"]))
    words = ["--query-compute-apps=gpu_uuid,pid,name,used_memory", "--format=csv,noheader"]
    assert ask(lab, *words)[0] == 2
    words[0] = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    assert ask(lab, *words)[1] == "GPU-1, 4711, python, a, b, 518 MiB\n"


def test_tables_are_given_one_a_call(lab: Lab, smi: FakeSmi) -> None:
    smi.gpus(*(csv("index, memory.used [MiB]", [f"0, {mib} MiB"]) for mib in (900, 5)))
    query = ["--query-gpu=memory.used", "--format=csv,noheader"]
    assert [ask(lab, *query)[1] for _ in range(3)] == ["900 MiB\n", "5 MiB\n", "5 MiB\n"]


def test_complaint_among_the_rows_is_printed_as_it_is(lab: Lab, smi: FakeSmi) -> None:
    lost = "Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error"
    smi.gpus(csv("index, name", ["0, A", lost, "2, C"]))
    assert ask(lab, "--query-gpu=name", "--format=csv,noheader")[1] == f"A\n{lost}\nC\n"


def test_recorded_samples_answer(lab: Lab, smi: FakeSmi) -> None:
    smi.sample(SAMPLE)
    words = ["--query-gpu=utilization.gpu,index", "--format=csv,noheader"]
    assert ask(lab, *words)[1] == "[GPU requires reset], 0\n12 %, 1\n"
    smi.sample(MISMATCH)
    status, text = ask(lab, *words)
    assert status == 18
    assert text.startswith("Failed to initialize NVML: Driver/library version mismatch\n")


def test_list_and_answers_for_one_kind(lab: Lab, smi: FakeSmi) -> None:
    assert ask(lab, "-L")[1].startswith("GPU 0: NVIDIA H200 (UUID: GPU-4d900621-")
    smi.says("<nvidia_smi_log/>\n", only_for="-q -x")
    smi.says("table\n", only_for="plain", status=14)
    assert ask(lab, "-q", "-x") == (0, "<nvidia_smi_log/>\n")
    assert ask(lab) == (14, "table\n")
    assert ask(lab, "--query-gpu=index", "--format=csv,noheader") == (0, "0\n1\n")


def test_hanging_one_needs_sigkill(lab: Lab, smi: FakeSmi) -> None:
    smi.hangs(60, ignores_term=True)
    started = time.monotonic()
    done = lab.node.run(["sh", "-c", "timeout -k 0.3 3 nvidia-smi; echo $?"])
    assert done.stdout == b"137\n"
    assert 3 < time.monotonic() - started < 30
    with pytest.raises(subprocess.TimeoutExpired):
        ask(lab, timeout_s=0.5)


def test_container_has_its_own_on_a_path_of_choice(lab: Lab, ct: Container) -> None:
    assert lab.node.run(["pct", "exec", "200", "--", "nvidia-smi"]).returncode == 127
    inside = lab.smi_in(ct)
    inside.install("/usr/local/bin")
    assert lab.node.run(["pct", "exec", "200", "--", "nvidia-smi"]).returncode == 127
    inside.install()
    done = lab.node.run(["pct", "exec", "200", "--", "nvidia-smi", "--query-gpu=index", "--format=csv,noheader"])
    assert done.stdout == b"0\n1\n"
    assert lab.node.run(["sh", "-c", "command -v nvidia-smi"]).returncode != 0
