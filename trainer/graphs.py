"""From a Python function over static buffers to what a worker's loop calls: warmed up, captured, replayed, timed.

Sound is one way only: the thread that replays a graph has compiled it, warmed it up on the capture stream and captured it,
while nothing else touches any GPU (the gate's turns see to that). All graphs of a worker share one memory pool: they are
replayed one after another in one stream, and nothing that a graph allocates inside is read after it.

Each `Graphs` and each `DeviceClock` belongs to one worker thread; other threads may read their numbers.
Sources: PyTorch's notes on CUDA graphs; pytorch #180090 (warm up on the capture stream), #107407 (thread_local capture).
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from trainer.config import Graphs as Mode

WARM_UP_CALLS = 3
"""Lazy initialisation and autotuning are over by then."""


@dataclass(slots=True)
class StageFacts:
    """What a stage says of itself; numbers that it has not are None."""

    device: str
    compile_s: float | None = None
    """The first call, which compiles."""
    capture_s: float | None = None
    captures: int = 0
    clock: "DeviceClock | None" = None
    addresses_unchanged: bool | None = None
    """Whether every static buffer lies where its graphs were captured, when last looked."""


class Graphs:
    """The graphs of one worker, made in its thread on its current stream."""

    def __init__(self, mode: Mode, device: torch.device, facts: StageFacts) -> None:
        """Nothing is captured yet. Only `threadwarm` captures here: the others run as they are compiled."""
        self.captures = mode == "threadwarm" and device.type == "cuda"
        self._device = device
        self._facts = facts
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None

    def warm_up(self, body: Callable[[], None]) -> None:
        """Call `body` as often as it takes to compile, allocate and tune; on the CPU there is nothing to warm up."""
        if self._device.type == "cpu":
            return
        for _ in range(WARM_UP_CALLS):
            begin = time.monotonic()
            body()
            torch.cuda.current_stream().synchronize()
            self._facts.compile_s = self._facts.compile_s or time.monotonic() - begin

    def ready(self, body: Callable[[], None]) -> Callable[[], None]:
        """What does `body` from now on: the replay of its graph, or itself. It was warmed up and must not synchronise."""
        if not self.captures:
            return body
        begin = time.monotonic()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        first: BaseException | None = None
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    body()
                except BaseException as error:
                    first = error
                    raise
        except BaseException:
            if first is not None:  # ending a capture that broke raises once more, and would hide why
                raise first from None
            raise
        self._facts.captures += 1
        self._facts.capture_s = (self._facts.capture_s or 0.0) + time.monotonic() - begin
        return graph.replay


def compiled(module: nn.Module, mode: Mode, device: torch.device) -> nn.Module:
    """`module` as it is called: compiled on a GPU; `lazy` and `mainwarm` leave its graphs to reduce-overhead mode."""
    if device.type == "cpu":
        return module
    how = "reduce-overhead" if mode in ("lazy", "mainwarm") else "default"
    return cast(nn.Module, torch.compile(module, fullgraph=True, dynamic=False, mode=how))


class DeviceClock:
    """How long a worker keeps its device busy, and a bound on how far the host runs ahead of it.

    On a GPU spans are measured by events in the current stream, so waiting for input is outside, and what other streams do on
    the same GPU makes them longer; on the CPU by the host's clock.
    """

    def __init__(self, device: torch.device, spans_per_step: int = 1) -> None:
        """No time has passed."""
        self.spans_per_step = spans_per_step
        self._cuda = device.type == "cuda"
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.reset()

    def reset(self) -> None:
        """Forget what was measured; waits for what is under way."""
        self.limit(0)
        self.busy_s = 0.0
        self.num_spans = 0
        self.counted_at = time.monotonic()
        """When the last span was counted, a few steps after it was put into the stream."""
        self.first_step_s: float | None = None
        """The spans of the first step."""

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """Measure what is put into the current stream inside."""
        if not self._cuda:
            begin = time.monotonic()
            yield
            self._count(time.monotonic() - begin)
            return
        pair = self._spare.pop() if self._spare else _timing_events()
        pair[0].record()
        yield
        pair[1].record()
        self._pending.append(pair)

    def limit(self, num_spans: int) -> None:
        """The host waits until at most `num_spans` are not over."""
        while len(self._pending) > num_spans:
            begin, end = self._pending.popleft()
            end.synchronize()
            self._count(begin.elapsed_time(end) / 1000)
            self._spare.append((begin, end))

    def _count(self, seconds: float) -> None:
        self.busy_s += seconds
        self.num_spans += 1
        self.counted_at = time.monotonic()
        if self.num_spans == self.spans_per_step:
            self.first_step_s = self.busy_s


def _timing_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True, blocking=True), torch.cuda.Event(enable_timing=True, blocking=True)
