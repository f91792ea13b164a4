"""What each kind of nvidia-smi output means. Samples keep the command and the report that they come from."""

import fcntl
import getpass
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from dflashctl.gpus import Gpu, GpuProcess, GpuReport, judge
from dflashctl.hosts import Idle
from dflashctl.smi import APP_FIELDS, GPU_FIELDS, parse_query, query_script

SAMPLES = Path(__file__).parent / "nvidia_smi"
GPU_HEADER = (
    "index, uuid, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%], "
    "temperature.gpu, power.draw [W], mig.mode.current"
)
APP_HEADER = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]"
UUID = f"GPU-{os.getpid():08x}-81f0-00be-a4f9-408f47134ea1"  # leases of every root are seen: a card of this worker's own
MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.211.01  Release Build  (dvs-builder)"


def sample(name: str) -> str:
    """The output in a sample file, without its comments."""
    return "\n".join(line for line in (SAMPLES / name).read_text().splitlines() if not line.startswith("#"))


def rows_of(name: str, part: int = 0) -> list[dict[str, str]]:
    """A sample's rows by the fields of its recorded command, as they read under `nounits`."""
    command = re.findall(r"--query-(?:gpu|compute-apps)=(\S+) --format=(\S+)", (SAMPLES / name).read_text())[part]
    fields = command[0].replace("gpu_name", "name").split(",")
    lines = [line for line in sample(name).split("---")[part].splitlines() if line]
    values = lines if "noheader" in command[1] else lines[1:]
    return [dict(zip(fields, re.sub(r" (MiB|%|W)(?=,|$)", "", line).split(", "), strict=True)) for line in values]


def gpu_row(row: Mapping[str, str], index: int = 0) -> str:
    """A sample's row as our query asks for it; fields that it lacks read [N/A]."""
    full = {"index": str(index), "uuid": f"GPU-{index}", "name": "NVIDIA H200"} | dict(row)
    return ", ".join(full.get(field, "[N/A]") for field in GPU_FIELDS.split(","))


def answer(gpus: list[str], apps: list[str] | None = None, *, status: int = 0, header: bool = True, driver: str = "") -> str:
    """What query_script(None) prints."""
    table = [GPU_HEADER, *gpus] if header else gpus
    return "\n".join(
        ["@gpus", *table, "", f"@status {status}", "@apps", APP_HEADER, *(apps or []), "", "@status 0", "@driver", driver]
    )


def parse_sample(name: str, apps: list[str] | None = None) -> GpuReport:
    return parse_query(answer([gpu_row(row, i) for i, row in enumerate(rows_of(name))], apps))


def states(report: GpuReport, idle: Idle | None = None) -> list[tuple[int | None, str, str]]:
    verdicts = [(gpu.index, judge(gpu, idle or Idle())) for gpu in report.gpus]
    return [(index, verdict.state, verdict.reason) for index, verdict in verdicts]


IN_SAMPLES = {
    "h200_x8_idle.csv": [(i, "idle", "1 MiB in use, utilization 0 %") for i in range(8)],
    "h200_x2_idle_real.csv": [(i, "idle", "0 MiB in use, utilization 0 %") for i in range(2)],
    "not_available_new_driver.csv": [(0, "idle", "0 MiB in use, utilization 0 %")],
    "not_supported_old_driver.csv": [(0, "idle", "0 MiB in use, utilization 0 %")],
    "a100_sxm4_busy.csv": [
        (0, "busy", "61234 MiB held by a process that is not visible here"),
        (1, "busy", "512 MiB held by a process that is not visible here"),
    ],
    "h100_one_leftover.csv": [
        (0, "unknown", "utilization.gpu reads [N/A]"),
        (1, "busy", "37155 MiB held by a process that is not visible here"),
    ],
    "unknown_error_field.csv": [(0, "busy", "utilization is 100 %")],
    "a100_mixed_x7.csv": [(i, "unknown", "memory.used reads [N/A]; utilization.gpu reads [N/A]") for i in (0, 4, 6)],
    "h200_x8_header_units.csv": [(i, "unknown", "memory.used reads [N/A]; utilization.gpu reads [N/A]") for i in (0, 7)],
    "mig_or_vgpu_na.csv": [(0, "unknown", "memory.used reads [N/A]; utilization.gpu reads [N/A]")],
    "rtx_4090.csv": [(0, "unknown", "memory.used reads [N/A]; utilization.gpu reads [N/A]")],
    "rtx_pro_6000.csv": [(i, "unknown", "memory.used reads [N/A]; utilization.gpu reads [N/A]") for i in range(3)],
    "mig_mode_query.csv": [
        (0, "unknown", "MIG is enabled, and slices are not supported; turn it off (nvidia-smi -mig 0) or leave the GPU out")
    ],
    "reset_required.csv": [
        (
            0,
            "unknown",
            "the GPU is in error (utilization.gpu reads [GPU requires reset]); "
            "reset it (nvidia-smi --gpu-reset) or reboot the host",
        )
    ],
    "reset_required_all_fields.csv": [
        (
            0,
            "unknown",
            "the GPU is in error (memory.used reads [GPU requires reset]); "
            "reset it (nvidia-smi --gpu-reset) or reboot the host",
        )
    ],
}


@pytest.mark.parametrize("name", IN_SAMPLES)
def test_every_sample_has_its_state_and_reason(name: str) -> None:
    report = parse_sample(name)
    assert (report.error, report.missing) == (None, False)
    assert states(report) == IN_SAMPLES[name]


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        ("h200_query_idle.txt", "idle", "0 MiB in use, utilization 0 %"),
        ("h200_query_busy.txt", "busy", "1551 MiB held by pid 423 (python3, 1542 MiB)"),
        ("h200_query_pid_namespace.txt", "busy", "1551 MiB held by a process that is not visible here"),
    ],
)
def test_real_answers_to_our_own_query(name: str, state: str, reason: str) -> None:
    report = parse_query(sample(name))
    assert report.error is None
    assert states(report) == [(0, state, reason)]


def test_values_are_read_as_shown() -> None:
    gpu = parse_sample("h200_x2_idle_real.csv").gpus[1]
    assert gpu == Gpu(
        index=1,
        uuid="GPU-7694f615-a85b-389a-8e1f-80f0505d3c36",
        name="NVIDIA H200",
        memory_used_mib=0,
        memory_total_mib=143771,
        utilization_percent=0,
        temperature_c=40,
        power_w=120.69,
        mig=False,
    )
    names = [gpu.name for gpu in parse_sample("rtx_pro_6000.csv").gpus]
    assert names[2] == "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"


def test_unknown_is_none_and_never_zero() -> None:
    gpu = parse_sample("mig_or_vgpu_na.csv").gpus[0]
    assert (gpu.memory_used_mib, gpu.memory_total_mib, gpu.utilization_percent) == (None, 24576, None)


def test_visible_holders_are_named_on_each_gpu_that_they_hold() -> None:
    apps = [f"{r['gpu_uuid']}, {r['pid']}, python, {r['used_gpu_memory']}" for r in rows_of("h100_x4_busy_shared.txt", part=1)]
    assert states(parse_sample("h100_x4_busy_shared.txt", apps)) == [
        (0, "busy", "529 MiB held by pid 2069192 (python, 77002 MiB), pid 2680904 (python, 518 MiB)"),
        (1, "idle", "5 MiB in use, utilization 0 %"),
        (2, "busy", "74709 MiB held by pid 2198486 (python, 74278 MiB); utilization is 98 %"),
        (3, "busy", "567 MiB held by pid 2680904 (python, 518 MiB)"),
    ]


def test_memory_in_use_is_busy_where_a_container_sees_no_process() -> None:
    apps = sample("container_apps_empty.txt").splitlines()
    report = parse_query(answer([f"0, {UUID}, NVIDIA H200, 71000, 143771, 0, 40, 120.5, Disabled"], apps))
    assert states(report) == [(0, "busy", "71000 MiB held by a process that is not visible here")]


def test_unified_memory_without_numbers_is_busy_while_a_process_computes() -> None:
    row = f"0, {UUID}, NVIDIA GB10, [N/A], [N/A], 0, 40, 12.5, [N/A]"
    apps = [f"{UUID}, {line}" for line in sample("apps_insufficient_permissions.csv").splitlines()]
    assert states(parse_query(answer([row], apps))) == [(0, "busy", "memory is unknown, but it is in use by pid 524")]
    assert states(parse_query(answer([row]))) == [(0, "unknown", "memory.used reads [N/A]")]


@pytest.mark.parametrize(
    "token",
    [
        "[N/A]",
        "[Not Supported]",
        "N/A",
        "[Unknown Error]",
        "[Insufficient Permissions]",
        "[Not Found]",
        "Unknown",
        "ERR!",
        "",
        "-1",
    ],
)
@pytest.mark.parametrize("field", ["memory.used", "utilization.gpu"])
def test_a_token_instead_of_a_number_is_unknown(field: str, token: str) -> None:
    row = gpu_row({"memory.used": "0", "utilization.gpu": "0"} | {field: token})
    ((_, state, reason),) = states(parse_query(answer([row])))
    assert state == "unknown"
    assert f"{field} reads {token}" in reason


def test_what_can_be_read_still_shows_that_a_gpu_is_busy() -> None:
    report = parse_query(answer([gpu_row({"memory.used": "70000"}, 0), gpu_row({"utilization.gpu": "71"}, 1)]))
    assert [state for _, state, _ in states(report)] == ["busy", "busy"]


def test_limits_are_the_hosts() -> None:
    report = parse_query(answer([gpu_row({"memory.used": "700", "utilization.gpu": "20"})]))
    assert states(report)[0][1:] == ("busy", "700 MiB held by a process that is not visible here; utilization is 20 %")
    assert states(report, Idle(max_memory_mib=700, max_utilization_percent=20))[0][1] == "idle"


def test_a_process_name_may_hold_commas_and_cannot_hold_control_characters() -> None:
    row = f"0, {UUID}, NVIDIA H200, 71000, 143771, 0, 40, 120.5, Disabled"
    report = parse_query(answer([row], [f"{UUID}, 4711, serve, fast, \x1b[2J, 70000"]))
    assert report.gpus[0].processes == (GpuProcess(pid=4711, memory_mib=70000, name="serve, fast, ?[2J"),)


def test_a_lost_gpu_is_unknown_and_the_others_are_judged() -> None:
    lost = sample("fail_device_lost.txt").splitlines()[0]
    good = [gpu_row({"memory.used": "0", "utilization.gpu": "0"}, i) for i in (0, 2)]
    report = parse_query("@gpus\n" + "\n".join([lost, GPU_HEADER, *good]) + "\n\n@status 15\n")
    assert report.error is None
    remedy = "reset it (nvidia-smi --gpu-reset) or reboot the host"
    assert states(report) == [
        (0, "idle", "0 MiB in use, utilization 0 %"),
        (1, "unknown", f"the GPU at 0000:34:00.0 does not answer (Unknown Error); {remedy}"),
        (2, "idle", "0 MiB in use, utilization 0 %"),
    ]
    older = "Unable to determine the device handle for GPU 0000:0B:00.0: GPU is lost.  Reboot the system"
    report = parse_query(answer([good[0], older, good[1]], status=255))
    assert [index for index, _, _ in states(report)] == [0, 2, None]
    assert states(report)[2][1] == "unknown"


def test_a_garbled_row_is_unknown_and_hides_no_other() -> None:
    good = gpu_row({"memory.used": "0", "utilization.gpu": "0"}, 1)
    report = parse_query(answer(["0, GPU-aaaa, NVIDIA H2", good], [good]))
    assert [(gpu.index, judge(gpu, Idle()).state) for gpu in report.gpus] == [(0, "unknown"), (1, "idle")]
    assert "cannot be read: 0, GPU-aaaa, NVIDIA H2" in judge(report.gpus[0], Idle()).reason


def test_a_corrupted_inforom_leaves_the_rows_valid() -> None:
    warning = sample("fail_infoROM_rc14.txt").strip()
    row = gpu_row({"memory.used": "0", "utilization.gpu": "0"})
    report = parse_query(answer([row, warning], status=14))
    assert (report.error, [state for _, state, _ in states(report)]) == (None, ["idle"])


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        (
            "fail_version_mismatch.txt",
            18,
            "the NVIDIA kernel module (570.211.01) and nvidia-smi's library (580.173) differ in version; "
            "install the same version on both sides, or reboot after a driver upgrade",
        ),
        ("fail_no_driver.txt", 9, "nvidia-smi cannot reach the NVIDIA driver; load or install it"),
        ("fail_bad_field.txt", 2, 'nvidia-smi failed with exit status 2: Field "bogus" is not a valid field to query.'),
        ("fail_device_lost.txt", 15, "nvidia-smi failed with exit status 15: Unable to determine the device handle for GPU1"),
    ],
)
def test_a_failure_is_a_sentence_and_no_gpu_is_listed(name: str, status: int, says: str) -> None:
    report = parse_query(answer(sample(name).splitlines(), status=status, header=False, driver=MODULE))
    assert report.error is not None
    assert report.error.startswith(says)
    assert report.gpus == ()


def test_a_container_that_lost_its_devices_is_told_apart() -> None:
    report = parse_query(answer(["Failed to initialize NVML: Unknown Error"], status=255, header=False))
    assert report.error is not None
    assert "restart the container" in report.error
    assert "runs that hold their GPUs go on" in report.error


def test_rows_of_a_query_that_failed_are_not_trusted() -> None:
    report = parse_query(answer([gpu_row({"memory.used": "0", "utilization.gpu": "0"})], status=139))
    assert report.error == "nvidia-smi failed with exit status 139: it printed no message"


def test_no_gpu_is_an_empty_list_with_a_note() -> None:
    missing, empty = (
        parse_query("@missing\n"),
        parse_query(answer(sample("fail_no_devices.txt").splitlines(), status=6, header=False)),
    )
    assert (missing.gpus, missing.error, missing.note) == ((), None, "there is no nvidia-smi on this host")
    assert (empty.gpus, empty.error, empty.note) == ((), None, "nvidia-smi finds no GPU on this host")


@pytest.mark.parametrize(
    "text", ["", "sh: 1: cannot fork\n", "@status 0\n", "@gpus\n", f"@gpus\n{GPU_HEADER}\n0, GPU-0, NVI", "@@"]
)
def test_a_torn_answer_is_an_error(text: str) -> None:
    report = parse_query(text)
    assert report.error is not None
    assert report.error.startswith("the GPU query was cut off: ")
    assert report.gpus == ()


def test_every_sample_is_used() -> None:
    text = Path(__file__).read_text()
    assert [path.name for path in SAMPLES.iterdir() if f'"{path.name}"' not in text] == []


def run_query(folder: Path, nvidia_smi: str, timeout: str = "-k 2 15", root: str | None = None) -> GpuReport:
    """The real script against a stand-in for nvidia-smi."""
    stand_in = folder / "nvidia-smi"
    stand_in.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    stand_in.chmod(0o755)
    script = query_script(root).replace("-k 2 15", timeout)
    done = subprocess.run(
        ["sh", "-s"],
        input=script,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stderr == ""
    return parse_query(done.stdout)


def test_the_script_asks_for_both_tables(tmp_path: Path) -> None:
    report = run_query(
        tmp_path,
        f"""
case "$*" in
  "--query-gpu={GPU_FIELDS} --format=csv,nounits")
    printf '%s\\n' '{GPU_HEADER}' '0, {UUID}, NVIDIA H200, 71000, 143771, 98, 40, 120.5, Disabled' ;;
  "--query-compute-apps={APP_FIELDS} --format=csv,nounits")
    printf '%s\\n' '{APP_HEADER}'; printf '%s' '{UUID}, 4711, python train.py, 70990' ;;
esac""",
    )
    assert states(report) == [(0, "busy", "71000 MiB held by pid 4711 (python train.py, 70990 MiB); utilization is 98 %")]


def test_the_script_passes_on_failures_of_either_stream(tmp_path: Path) -> None:
    report = run_query(tmp_path, "echo 'NVIDIA-SMI has failed because of us' >&2; exit 9")
    assert report.error == "nvidia-smi failed with exit status 9: NVIDIA-SMI has failed because of us"


@pytest.mark.parametrize("ignores_term", [False, True])
def test_a_hanging_nvidia_smi_is_a_time_out(tmp_path: Path, ignores_term: bool) -> None:
    stand_in = "trap '' TERM\nwhile :; do sleep 1; done" if ignores_term else "exec sleep 60"
    report = run_query(tmp_path, stand_in, timeout="-k 0.2 0.3")
    assert report.error is not None
    assert report.error.startswith("GPU query timed out")


def one(memory: str, utilization: str) -> str:
    return gpu_row({"memory.used": memory, "memory.total": "143771", "utilization.gpu": utilization, "uuid": UUID})


@pytest.mark.parametrize(
    ("looks", "state", "says"),
    [
        ([("0", "0"), ("0", "97"), ("0", "0")], "busy", "utilization is 97 %"),  # computes in bursts
        ([("71000", "0"), ("900", "0"), ("0", "0")], "busy", "71000 MiB held"),  # somebody is just leaving, or just coming
        ([("0", "0"), ("[N/A]", "0"), ("0", "0")], "unknown", "memory.used reads [N/A]"),
        ([("0", "0"), ("0", "0"), ("0", "0")], "idle", "0 MiB in use"),
        ([("700", "0"), ("700", "71"), ("700", "3")], "busy", "utilization is 71 %"),
    ],
)
def test_a_gpu_is_what_it_was_at_its_worst_look(looks, state: str, says: str) -> None:
    report = parse_query("\n".join(answer([one(*look)]) for look in looks))
    (verdict,) = states(report, Idle(max_memory_mib=800))
    assert verdict[1] == state
    assert says in verdict[2]


def test_a_gpu_that_is_not_there_at_every_look_is_unknown() -> None:
    report = parse_query(
        answer([gpu_row({"memory.used": "0", "utilization.gpu": "0"}, 0), one("0", "0")]) + "\n" + answer([one("0", "0")])
    )
    assert sorted(state for _, state, _ in states(report)) == ["idle", "unknown"]


def test_a_look_that_fails_makes_all_of_them_fail() -> None:
    report = parse_query(
        answer([one("0", "0")]) + "\n" + answer(["Failed to initialize NVML: Unknown Error"], status=255, header=False)
    )
    assert report.error is not None
    assert report.gpus == ()


def holder_script(name: str, pid: int) -> str:
    return f"""
case "$1" in
  --query-gpu=*) printf '%s\\n' '{GPU_HEADER}' '0, {UUID}, NVIDIA H200, 71000, 143771, 98, 40, 120.5, Disabled' ;;
  *) printf '%s\\n' '{APP_HEADER}' '{UUID}, {pid}, {name}, 70990' ;;
esac"""


def test_a_visible_holder_is_named_with_user_command_and_run(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"], env={"DFLASHCTL_RUN": "quick-7"}) as holder:
        (gpu,) = run_query(tmp_path, holder_script("/usr/bin/sleep", holder.pid)).gpus
        (stranger,) = run_query(tmp_path, holder_script("/usr/bin/python3", holder.pid)).gpus
        holder.kill()
    user = getpass.getuser()
    assert f"held by run quick-7, pid {holder.pid} of {user} (sleep 600, 70990 MiB)" in judge(gpu, Idle()).reason
    # inside a container the driver's pids are those of the machine around it: that number is another process here
    assert f"held by pid {holder.pid} (/usr/bin/python3, 70990 MiB)" in judge(stranger, Idle()).reason


def test_a_lease_is_seen_with_its_holder_while_it_is_locked(tmp_path: Path) -> None:
    root = tmp_path / "my root"
    (root / "leases").mkdir(parents=True)
    lease = root / "leases" / UUID
    lease.write_text('{"run": "quick-1", "by": "ann@laptop", "since": "2026-11-29T10:00:00Z"}\n')
    idle_gpu = f"printf '%s\\n' '{GPU_HEADER}' '0, {UUID}, NVIDIA H200, 0, 143771, 0, 40, 120.5, Disabled'"
    with open(lease) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held = run_query(tmp_path, idle_gpu, root=str(root))
        seen_through_processes = run_query(tmp_path, idle_gpu)
    for report in (held, seen_through_processes):
        assert states(report) == [(0, "busy", "it is held by run quick-1 of ann@laptop since 2026-11-29T10:00:00Z")]
    lease.write_text("\x1b[31mtorn")
    assert states(run_query(tmp_path, idle_gpu, root=str(root)))[0][1] == "idle"
    with open(lease) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert states(run_query(tmp_path, idle_gpu, root=str(root)))[0][1:] == ("busy", "it is held by a run")


def test_a_run_that_ends_while_its_lease_is_looked_at_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    with subprocess.Popen(["flock", "-F", tmp_path / "leases" / UUID, "sleep", "600"]) as holder:
        flock = tmp_path / "flock"  # seen through the process; it ends before its lease is tried
        flock.write_text(f'#!/bin/sh\nkill {holder.pid}; while [ -e "$3" ]; do :; done\nexec /usr/bin/flock "$@"\n')
        flock.chmod(0o755)
        while not os.readlink(f"/proc/{holder.pid}/exe").endswith("sleep"):
            assert holder.poll() is None
        idle_gpu = f"printf '%s\\n' '{GPU_HEADER}' '0, {UUID}, NVIDIA H200, 0, 143771, 0, 40, 120.5, Disabled'"
        assert states(run_query(tmp_path, idle_gpu))[0][1] == "idle"
        assert holder.wait(10) == -15


def test_a_pipe_with_a_leases_name_holds_up_nobody(tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    os.mkfifo(tmp_path / "leases" / UUID)
    pipe = os.open(tmp_path / "leases" / UUID, os.O_RDWR)
    idle_gpu = f"printf '%s\\n' '{GPU_HEADER}' '0, {UUID}, NVIDIA H200, 0, 143771, 0, 40, 120.5, Disabled'"
    for root in (str(tmp_path), None):
        assert states(run_query(tmp_path, idle_gpu, root=root))[0][1] == "idle"
    os.close(pipe)


@pytest.mark.parametrize(
    "mark", ["@missing", "@gpus", "@status 0", "@leases\n" + UUID + "\t\theld\t{}"], ids=["missing", "gpus", "status", "leases"]
)
def test_what_nvidia_smi_says_begins_no_section(tmp_path: Path, mark: str) -> None:
    (gpu,) = run_query(tmp_path, holder_script(f"evil\n{mark}\n", 4711)).gpus
    assert gpu.memory_used_mib == 71000
    assert gpu.leases == ()
