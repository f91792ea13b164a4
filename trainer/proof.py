"""What a run can prove about itself: that nothing was captured, compiled or allocated after the gate, and where the time went.

Everything is read from counters that the workers, torch and its allocator keep anyway; reading synchronises nothing. `Proof`
belongs to the supervisor's thread; it runs one thread of its own, `sleeper`, which only sleeps and looks how late it wakes.
"""

import collections
import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.config import TrainConfig
from trainer.graphs import StageFacts
from trainer.model.draft import DraftSpec, TargetInfo
from trainer.wiring import Wiring

GIB = 1 << 30
CEILING_FILE = "ceiling.json"
"""Where, below `run.root`, `python -m trainer.bench ceiling` leaves what this machine can do."""


class Proof:
    """Counts from the opening of the gate; rates and fractions count from the last `mark`."""

    def __init__(self, config: TrainConfig, wiring: Wiring, spec: DraftSpec, info: TargetInfo) -> None:
        """The gate is opening now."""
        self._config, self._wiring = config, wiring
        self._flop = {"draft": draft_flop(config, spec, info.vocab_size), "target": target_flop(config, spec, info)}
        self._captures = _captures(wiring)
        self._graphs = _unique_graphs()
        self._memory = {device: _allocations(device) for device in _gpus(config)}
        self._sleeper = _Sleeper()
        self.mark()

    def mark(self) -> None:
        """Rates and fractions count from now."""
        self._since = time.monotonic()
        self._waits = waits(self._wiring)
        self._counted = {name: _counted(facts) for name, facts in self._wiring.facts.items()}

    def read(self, *, steps: int, context_tokens: int, draft_tokens: float) -> dict[str, Any]:
        """The proof; steps and tokens are those since the last `mark`. Rates of no steps are not known."""
        seconds = time.monotonic() - self._since
        num_batches = steps * len(self._config.pipeline.drafter_devices)
        tflops = {name: self._tflops(name, num_batches, seconds) for name in self._wiring.facts} if steps else {}
        waited = waits(self._wiring).shares_since(self._waits)
        return {
            "captures_before_gate": self._captures,
            "captures_after_gate": _captures(self._wiring) - self._captures,
            "recompiles": _unique_graphs() - self._graphs,
            "stages": {name: self._stage(name, facts, waited[name]) for name, facts in self._wiring.facts.items()},
            "gpus": {device: self._gpu(device, tflops) for device in self._memory},
            "channel_depths": {c.name: c.statistics().depth for c in self._wiring.channels},
            "steps_per_s": steps / seconds if steps else None,
            "context_tokens_per_s": context_tokens / seconds if steps else None,
            "draft_tokens_per_s": draft_tokens / seconds if steps else None,
            "sleeper_p99_ms": self._sleeper.late_p99_ms(),
        }

    def close(self) -> None:
        """End the sleeper."""
        self._sleeper.stop()

    def _stage(self, name: str, facts: StageFacts, waited: Mapping[str, float]) -> dict[str, Any]:
        clock = facts.clock
        busy_s, spans, until_s = (after - before for after, before in zip(_counted(facts), self._counted[name], strict=True))
        return {
            "device": facts.device,
            "compile_s": facts.compile_s,
            "capture_s": facts.capture_s,
            "first_step_s": clock.first_step_s if clock else None,
            "steady_step_s": busy_s / spans * clock.spans_per_step if clock and spans else None,
            "busy": busy_s / until_s if spans else None,
            "waits": waited,
            "addresses_unchanged": facts.addresses_unchanged,
        }

    def _gpu(self, device: str, tflops: Mapping[str, float]) -> dict[str, Any]:
        stats, before = _allocations(device), self._memory[device]
        here = sum(tflops[name] for name, facts in self._wiring.facts.items() if facts.device == device) if tflops else None
        ceiling = _ceiling(Path(self._config.run.root))
        return {
            "device_allocs_after_gate": stats["allocs"] - before["allocs"],
            "alloc_retries_after_gate": stats["retries"] - before["retries"],
            "reserved_gib": stats["reserved"] / GIB,
            "peak_gib": stats["peak"] / GIB,
            "tflops": here,
            "ceiling_share": here / ceiling if here is not None and ceiling else None,
        }

    def _tflops(self, name: str, num_batches: int, seconds: float) -> float:
        kind = name.split("-")[0]
        num = len(self._config.pipeline.drafter_devices if kind == "draft" else self._config.pipeline.target_devices)
        return self._flop[kind] * num_batches / num / seconds / 1e12


def draft_flop(config: TrainConfig, spec: DraftSpec, vocab_size: int) -> float:
    """FLOP of a drafter's step on one batch, padding counted, the scores of attention (a few per cent) not.

    Forward 2 and backward 4 a weight and token; the features and the frozen head need half a backward. Labels from the target's
    logits take the head once more.
    """
    context = config.token_budget
    queries = config.batch.rows * config.draft.num_anchors * spec.block_size
    width, kv = spec.hidden_size, spec.num_key_value_heads * spec.head_dim
    attention = spec.num_attention_heads * spec.head_dim
    layer = (context + queries) * 2 * width * kv + 2 * queries * width * attention
    layer += 3 * queries * width * spec.intermediate_size
    head = (6 if config.optim.loss_labels == "logits" else 4) * queries * (1 - 1 / spec.block_size) * width * vocab_size
    return 4 * context * len(spec.target_layer_ids) * width**2 + 6 * spec.num_layers * layer + head


def target_flop(config: TrainConfig, spec: DraftSpec, info: TargetInfo) -> float:
    """FLOP of the target's forward on one batch, up to the last layer that is run, scores of attention not counted."""
    attention, kv = info.num_attention_heads * info.head_dim, info.num_key_value_heads * info.head_dim
    layer = 2 * info.hidden_size * (2 * attention + 2 * kv + 3 * info.intermediate_size)
    num_layers = info.num_layers if config.optim.loss_labels == "logits" else spec.target_layer_ids[-1] + 1
    return float(config.token_budget * num_layers * layer)


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that each worker has waited on the host: for input, for room behind it, for other drafters."""

    seconds: Mapping[str, Mapping[str, float]]
    begin: float
    """When the first of them was read."""
    end: float
    """When all of them had been."""

    def shares_since(self, before: "Waits") -> dict[str, dict[str, float]]:
        """How much of the time since then each worker waited; not above 1, however slowly all this was read."""
        span = self.end - before.begin
        return {
            worker: {end: (total - before.seconds[worker][end]) / span for end, total in ends.items()}
            for worker, ends in self.seconds.items()
        }


def waits(wiring: Wiring) -> Waits:
    """How long they have waited until now."""
    begin = time.monotonic()
    batches = [channel.statistics() for channel in wiring.batches]
    totals = {"prefetch-0": {"out": sum(channel.send_wait_s for channel in batches)}}
    for rank, inbox in enumerate(batches):
        out = sum(c.statistics().receive_wait_s for (target, _), c in wiring.free.items() if target == rank)
        totals[f"target-{rank}"] = {"in": inbox.receive_wait_s, "out": out}
    for rank, others in enumerate(wiring.drafter_sum.wait_s):
        inbox_s = sum(c.statistics().receive_wait_s for (_, drafter), c in wiring.features.items() if drafter == rank)
        totals[f"draft-{rank}"] = {"in": inbox_s, "drafters": others}
    return Waits(totals, begin, time.monotonic())


class _Sleeper:
    """Sleeps 1 ms again and again: waking late means that somebody holds the interpreter or the cores."""

    _PAUSE_S = 0.02
    _KEPT = 5000

    def __init__(self) -> None:
        self._late_ms: collections.deque[float] = collections.deque(maxlen=self._KEPT)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sleeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(1.0)

    def late_p99_ms(self) -> float | None:
        late = sorted(self._late_ms)
        return late[int(0.99 * len(late))] if late else None

    def _run(self) -> None:
        while not self._stopped.wait(self._PAUSE_S):
            begin = time.perf_counter()
            time.sleep(0.001)
            self._late_ms.append((time.perf_counter() - begin) * 1000 - 1)


def _captures(wiring: Wiring) -> int:
    return sum(facts.captures for facts in wiring.facts.values())


def _unique_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")  # a run that compiles nothing need not import it
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def _counted(facts: StageFacts) -> tuple[float, int, float]:
    """Busy seconds, spans, and when the last of them was counted: spans are counted late, so they bring their own time."""
    clock = facts.clock
    return (clock.busy_s, clock.num_spans, clock.counted_at) if clock else (0.0, 0, 0.0)


def _gpus(config: TrainConfig) -> list[str]:
    devices = dict.fromkeys(config.pipeline.target_devices + config.pipeline.drafter_devices)
    return [device for device in devices if device != "cpu"]


def _allocations(device: str) -> dict[str, int]:
    stats = torch.cuda.memory_stats(device)
    return {
        "allocs": stats["num_device_alloc"],
        "retries": stats["num_alloc_retries"],
        "reserved": stats["reserved_bytes.all.current"],
        "peak": stats["reserved_bytes.all.peak"],
    }


def _ceiling(root: Path) -> float | None:
    """TFLOP/s of a matrix product, as measured before; None if nobody has, or the file is damaged."""
    try:
        return float(json.loads((root / CEILING_FILE).read_text(encoding="utf-8"))["matmul_tflops"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
