"""Which GPUs a run gets, and the one sentence with which it is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from dflashctl.errors import ConfigurationError, DflashctlError, GpuBusyError, GpuUnknownError
from dflashctl.gpus import Gpu, GpuProcess, GpuReport
from dflashctl.hosts import Host, Idle
from dflashctl.placement import choose, overridden, parse_gpus, visible_devices

HOST = Host(name="box", transport="ssh", ssh="box", root="/workspace", python="/usr/bin/python3")


def idle(index: int) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", name="NVIDIA H200", memory_used_mib=0, utilization_percent=0)


def busy(index: int) -> Gpu:
    holder = GpuProcess(pid=4711, memory_mib=70990, name="python")
    return replace(idle(index), memory_used_mib=71000, processes=(holder,))


def unknown(index: int) -> Gpu:
    return replace(idle(index), utilization_percent=None, unread={"utilization.gpu": "[N/A]"})


LOST = Gpu(index=None, uuid=None, name=None, fault="the GPU at 0000:34:00.0 does not answer (Unknown Error)")


def report(*kinds: Callable[[int], Gpu]) -> GpuReport:
    return GpuReport(gpus=tuple(kind(index) for index, kind in enumerate(kinds)))


def indices(gpus: tuple[Gpu, ...]) -> list[int | None]:
    return [gpu.index for gpu in gpus]


def test_a_cpu_run_asks_nothing_of_gpus() -> None:
    assert choose(GpuReport(error="nvidia-smi hangs"), HOST, None, 0) == ()
    assert choose(GpuReport(missing=True), HOST, 8, 0) == ()
    assert visible_devices(()) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ""}


def test_a_count_takes_the_first_idle_ones() -> None:
    given = report(busy, idle, unknown, idle, idle)
    assert indices(choose(given, HOST, 2, 2)) == [1, 3]
    assert indices(choose(given, HOST, None, 2)) == [1, 3]
    assert indices(choose(given, HOST, 3, 2)) == [1, 3, 4]


def test_named_gpus_are_taken_in_the_order_given_and_shown_by_uuid() -> None:
    chosen = choose(report(idle, idle, busy), HOST, (1, 0), 2)
    assert indices(chosen) == [1, 0]
    assert visible_devices(chosen) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-0"}


def test_a_host_may_allow_only_some() -> None:
    host = replace(HOST, gpus=(2, 3))
    assert indices(choose(report(idle, idle, idle, idle), host, None, 1)) == [2]


def test_the_hosts_limits_decide_what_is_idle() -> None:
    host = replace(HOST, idle=Idle(max_memory_mib=80000))
    assert indices(choose(report(busy), host, None, 1)) == [0]


BUSY = "busy: 71000 MiB held by pid 4711 (python, 70990 MiB)"


@pytest.mark.parametrize(
    ("given", "allowed", "requested", "needed", "kind", "says"),
    [
        (report(idle, busy), None, (0, 1), 2, GpuBusyError, f"box: GPU 1 is {BUSY}"),
        (
            report(busy, unknown, busy),
            None,
            (0, 1, 2),
            2,
            GpuBusyError,
            f"box: GPU 0 is {BUSY}; GPU 1 is unknown: utilization.gpu reads [N/A]; GPU 2 is {BUSY}",
        ),
        (report(idle, unknown), None, (0, 1), 2, GpuUnknownError, "box: GPU 1 is unknown: utilization.gpu reads [N/A]"),
        (
            report(idle, busy),
            None,
            None,
            2,
            GpuBusyError,
            f"box: 1 of 2 GPUs are idle, but 2 are asked for; GPU 1 is {BUSY}",
        ),
        (
            report(unknown),
            None,
            1,
            1,
            GpuUnknownError,
            "box: 0 of 1 GPUs are idle, but 1 are asked for; GPU 0 is unknown: utilization.gpu reads [N/A]",
        ),
        (
            GpuReport(gpus=(idle(0), LOST)),
            (0, 1),
            2,
            2,
            GpuUnknownError,
            "box: 1 of 2 GPUs are idle, but 2 are asked for; GPU ? is unknown: the GPU at 0000:34:00.0 does not answer "
            "(Unknown Error)",
        ),
        (
            GpuReport(gpus=(idle(0), LOST)),
            None,
            (1,),
            1,
            GpuUnknownError,
            "box does not list GPU 1; the GPU at 0000:34:00.0 does not answer (Unknown Error)",
        ),
        (GpuReport(error="GPU query timed out"), None, 1, 1, GpuUnknownError, "box: GPU query timed out"),
        (
            GpuReport(gpus=(idle(0),), error="nvidia-smi failed with exit status 139"),
            None,
            (0,),
            1,
            GpuUnknownError,
            "box: nvidia-smi failed with exit status 139",
        ),
        (
            GpuReport(missing=True),
            None,
            None,
            1,
            ConfigurationError,
            "the experiment needs 1 GPU(s), but box has none: there is no nvidia-smi on this host",
        ),
        (
            GpuReport(),
            None,
            1,
            1,
            ConfigurationError,
            "the experiment needs 1 GPU(s), but box has none: nvidia-smi finds no GPU on this host",
        ),
        (report(idle, idle), None, (2,), 1, ConfigurationError, "box has no GPU 2; it has 0, 1"),
        (report(idle, idle), (1,), (0,), 1, ConfigurationError, "GPU 0 is not among those allowed on box: 1"),
        (report(idle, idle), (1,), 2, 2, ConfigurationError, "box has 1 of 2 GPUs for runs, but 2 are asked for"),
        (report(idle, busy), None, 3, 3, ConfigurationError, "box has 2 GPUs for runs, but 3 are asked for"),
        (report(idle, idle), None, 1, 2, ConfigurationError, "the experiment's devices need 2 GPU(s), but gpus asks for 1"),
        (report(idle, idle), None, (0,), 2, ConfigurationError, "the experiment's devices need 2 GPU(s), but gpus asks for 1"),
    ],
)
def test_a_refusal_has_one_reason(
    given: GpuReport,
    allowed: tuple[int, ...] | None,
    requested: tuple[int, ...] | int | None,
    needed: int,
    kind: type[DflashctlError],
    says: str,
) -> None:
    with pytest.raises(kind) as error:
        choose(given, replace(HOST, gpus=allowed), requested, needed)
    assert str(error.value) == says


def test_force_takes_idle_gpus_first_and_says_what_it_overrides() -> None:
    mixed = report(busy, idle, unknown)
    chosen = choose(mixed, HOST, 2, 1, force=True)
    assert [gpu.index for gpu in chosen] == [1, 0]
    assert overridden(chosen, HOST) == [f"GPU 0 is {BUSY}"]
    assert [gpu.index for gpu in choose(mixed, HOST, (2,), 1, force=True)] == [2]


def test_a_refusal_carries_its_gpus_for_json_and_a_hint() -> None:
    with pytest.raises(GpuBusyError) as error:
        choose(report(busy), HOST, (0,), 1)
    reason = BUSY.removeprefix("busy: ")
    assert error.value.details == {"gpus": [{"index": 0, "uuid": "GPU-0", "state": "busy", "reason": reason}]}
    for way in ("dflashctl gpus box", "--gpus", "--wait-gpu", "--force"):
        assert way in error.value.hint


def test_gpus_on_the_command_line_are_indices() -> None:
    assert parse_gpus("0,1") == (0, 1)
    assert parse_gpus("3") == (3,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0,x", "--gpus[1] must be a whole number of 0 or more, got 'x'"),
        ("0-3", "--gpus[0] must be a whole number of 0 or more, got '0-3'"),
        ("-1", "--gpus[0] must be a whole number of 0 or more, got -1"),
        ("1,1", "--gpus must name each GPU once, got [1, 1]"),
        ("", "--gpus must name at least one GPU, got nothing"),
    ],
)
def test_other_text_for_gpus_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_gpus(text)
    assert str(error.value) == says
