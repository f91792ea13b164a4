"""The bounded channel between two worker threads, after trio's memory channels.

A module of its own because its five errors and their meanings are what every stage relies on. One thread sends, one receives;
any thread may abort or ask for statistics. A wait that lasts longer than its time-out raises TimeoutError.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class EndOfChannel(Exception):
    """The sender closed the channel and everything it sent has been received."""


class ClosedResourceError(Exception):
    """The sender closed this channel itself and then sent again."""


class BrokenResourceError(Exception):
    """The channel was aborted; `__cause__` is why."""


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """What a channel looks like now; the waits count from its creation and include one that is going on."""

    depth: int
    send_wait_s: float
    receive_wait_s: float


class Channel(Generic[T]):
    """At most `capacity` items on their way from one thread to another."""

    def __init__(self, name: str, capacity: int) -> None:
        """An open, empty channel; `name` appears in its errors."""
        assert capacity >= 1
        self.name = name
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._cause: BaseException | None = None
        self._send_wait = _Stopwatch()
        self._receive_wait = _Stopwatch()

    def send(self, item: T, *, timeout_s: float) -> None:
        """Hand over `item`, waiting for room; raises ClosedResourceError, BrokenResourceError, TimeoutError."""
        with self._changed:
            self._wait(self._send_wait, lambda: self._closed or len(self._items) < self._capacity, timeout_s)
            if self._closed:
                raise ClosedResourceError(f"channel {self.name} was closed by its sender")
            self._items.append(item)
            self._changed.notify_all()

    def receive(self, *, timeout_s: float) -> T:
        """The oldest item, waiting for one; raises EndOfChannel, BrokenResourceError, TimeoutError."""
        with self._changed:
            self._wait(self._receive_wait, lambda: self._closed or bool(self._items), timeout_s)
            if not self._items:
                raise EndOfChannel(f"channel {self.name} has ended")
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        """The sender's last word: what was sent can still be received."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abort(self, cause: BaseException) -> None:
        """Break both ends at once with `cause` and drop what was on its way; the first cause stays."""
        with self._changed:
            self._cause = self._cause or cause
            self._items.clear()
            self._changed.notify_all()

    def statistics(self) -> ChannelStatistics:
        """Depth and waits; which end waits longer tells which stage starves."""
        with self._changed:
            return ChannelStatistics(len(self._items), self._send_wait.total_s, self._receive_wait.total_s)

    def _wait(self, stopwatch: "_Stopwatch", ready: Callable[[], bool], timeout_s: float) -> None:
        with stopwatch:
            in_time = self._changed.wait_for(lambda: self._cause is not None or ready(), timeout_s)
        if self._cause is not None:
            raise BrokenResourceError(f"channel {self.name} was aborted") from self._cause
        if not in_time:
            raise TimeoutError(f"channel {self.name}: nothing moved for {timeout_s:g} s")


class _Stopwatch:
    """Seconds spent inside its `with` blocks, by one thread at a time."""

    def __init__(self) -> None:
        self._done_s = 0.0
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._done_s, self._since = self.total_s, None

    @property
    def total_s(self) -> float:
        return self._done_s + (0.0 if self._since is None else time.monotonic() - self._since)
