"""Which GPUs a run gets, and the environment that shows it exactly these.

A module of its own because a launch must refuse for one stated reason: the host has no such GPU (configuration), somebody
uses it (busy), or nobody can tell (unknown). Pure; any thread may call it.
"""

from collections.abc import Iterable, Sequence

from dflashctl import strict_yaml
from dflashctl.errors import ConfigurationError, GpuBusyError, GpuUnknownError
from dflashctl.gpus import Gpu, GpuReport, GpuState, judge
from dflashctl.hosts import Host


def parse_gpus(text: str) -> tuple[int, ...]:
    """`--gpus 0,1` as indices in that order; raises ConfigurationError."""
    if not text.strip():
        raise ConfigurationError("--gpus must name at least one GPU, got nothing")
    return strict_yaml.gpu_indices("--gpus", strict_yaml.parse_scalar(f"[{text}]", "--gpus"))


def choose(
    report: GpuReport, host: Host, requested: tuple[int, ...] | int | None, needed: int, force: bool = False
) -> tuple[Gpu, ...]:
    """GPUs of `host` for a run whose devices need `needed` of them; a CPU run (0) gets none and asks nothing.

    Indices are taken as named, in that order, or refused; of a count (default: `needed`) the first idle ones are taken, and
    with `force` those that are not idle after them. Raises ConfigurationError, GpuBusyError, GpuUnknownError.
    """
    if needed == 0:
        return ()
    count = needed if requested is None else requested if isinstance(requested, int) else len(requested)
    if count < needed:
        raise ConfigurationError(f"the experiment's devices need {needed} GPU(s), but gpus asks for {count}")
    if report.error:
        raise GpuUnknownError(f"{host.name}: {report.error}")
    if report.note:
        raise ConfigurationError(f"the experiment needs {needed} GPU(s), but {host.name} has none: {report.note}")
    if isinstance(requested, tuple):
        return _named(report, host, requested, force)
    return _first_idle(report, host, count, force)


def visible_devices(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Environment that shows a run exactly these GPUs, as cuda:0, cuda:1, ... in this order; none for a CPU run."""
    # by uuid, since CUDA's own order may differ from nvidia-smi's
    names = ",".join(gpu.uuid or str(gpu.index) for gpu in gpus)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": names}


def overridden(chosen: Sequence[Gpu], host: Host) -> list[str]:
    """What speaks against the GPUs that were chosen all the same."""
    return [
        f"GPU {gpu.index} is {state.state}: {state.reason}" for gpu, state in _judged(chosen, host) if state.state != "idle"
    ]


def _named(report: GpuReport, host: Host, indices: tuple[int, ...], force: bool) -> tuple[Gpu, ...]:
    by_index = {gpu.index: gpu for gpu in report.gpus}
    for index in indices:
        if host.gpus is not None and index not in host.gpus:
            raise ConfigurationError(f"GPU {index} is not among those allowed on {host.name}: {_list(host.gpus)}")
        if index not in by_index and None in by_index:
            raise GpuUnknownError(f"{host.name} does not list GPU {index}; {judge(by_index[None], host.idle).reason}")
        if index not in by_index:
            raise ConfigurationError(f"{host.name} has no GPU {index}; it has {_list(by_index)}")
    chosen = tuple(by_index[index] for index in indices)
    refused = [(gpu, state) for gpu, state in _judged(chosen, host) if state.state != "idle"]
    if refused and not force:
        raise _refusal(host, "", refused)
    return chosen


def _first_idle(report: GpuReport, host: Host, count: int, force: bool) -> tuple[Gpu, ...]:
    # a lost GPU may not tell its index, and may be one of those allowed
    allowed = [gpu for gpu in report.gpus if host.gpus is None or gpu.index is None or gpu.index in host.gpus]
    if count > len(allowed):
        restricted = f" of {len(report.gpus)}" if len(allowed) < len(report.gpus) else ""
        raise ConfigurationError(f"{host.name} has {len(allowed)}{restricted} GPUs for runs, but {count} are asked for")
    judged = _judged(allowed, host)
    idle = [gpu for gpu, state in judged if state.state == "idle"]
    if force:  # a GPU without a uuid cannot be told apart, let alone be used
        idle += [gpu for gpu, state in judged if state.state != "idle" and gpu.uuid]
    if len(idle) < count:
        refused = [(gpu, state) for gpu, state in judged if state.state != "idle"]
        raise _refusal(host, f"{len(idle)} of {len(allowed)} GPUs are idle, but {count} are asked for; ", refused)
    return tuple(idle[:count])


def _judged(gpus: Iterable[Gpu], host: Host) -> list[tuple[Gpu, GpuState]]:
    return [(gpu, judge(gpu, host.idle)) for gpu in gpus]


def _refusal(host: Host, what: str, refused: Sequence[tuple[Gpu, GpuState]]) -> GpuBusyError | GpuUnknownError:
    """Busy if any of them is, since waiting may help then."""
    kind = GpuBusyError if any(state.state == "busy" for _, state in refused) else GpuUnknownError
    each = "; ".join(
        f"GPU {'?' if gpu.index is None else gpu.index} is {state.state}: {state.reason}" for gpu, state in refused
    )
    rows = [{"index": gpu.index, "uuid": gpu.uuid, "state": state.state, "reason": state.reason} for gpu, state in refused]
    return kind(
        f"{host.name}: {what}{each}",
        hint=f"'dflashctl gpus {host.name}' shows all of them; '--gpus' chooses others, '--wait-gpu' waits for busy ones, "
        "'--force' starts in spite of it",
        details={"gpus": rows},
    )


def _list(indices: Iterable[int | None]) -> str:
    return ", ".join(str(index) for index in indices) or "none"
