"""The startup gate: workers prepare one by one in a fixed order, none goes on before all are there, one that fails stops all.

A module of its own because compiling and capturing need it: two threads that compile at once break each other, and nothing else
may touch a GPU while a worker captures there.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator


class GateBrokenError(Exception):
    """The gate was aborted before it opened; `__cause__` is why."""


class StartupGate:
    """Opens once, when every party has arrived."""

    def __init__(self, parties: Collection[str], on_open: Callable[[], None]) -> None:
        """A shut gate; turns go in the order of `parties`, those that take none come last.

        `on_open` runs once, in the last party's thread, before anybody passes.
        """
        self._missing = set(parties)
        self._turns = list(parties)
        self._on_open = on_open
        self._changed = threading.Condition()
        self._cause: BaseException | None = None

    @contextlib.contextmanager
    def turn(self, party: str, *, timeout_s: float) -> Iterator[None]:
        """Prepare inside, alone; raises GateBrokenError, or TimeoutError that names who has been at it for `timeout_s`.

        Whoever raises inside keeps the turn: nobody else prepares until the gate is aborted.
        """
        with self._changed:
            in_time = self._wait(lambda: self._turns[0] == party, timeout_s)
            if not in_time:
                raise TimeoutError(f"startup gate: {self._turns[0]} has been preparing for {timeout_s:g} s")
        yield
        with self._changed:
            self._turns.remove(party)
            self._changed.notify_all()

    def pass_through(self, party: str, *, timeout_s: float) -> None:
        """Arrive, wait for the others, go on; raises GateBrokenError, or TimeoutError that names who is missing.

        The time-out begins anew whenever a turn ends or a party arrives.
        """
        with self._changed:
            self._missing.remove(party)
            if not self._missing and self._cause is None:
                self._on_open()
            self._changed.notify_all()
            if not self._wait(lambda: not self._missing, timeout_s):
                names = ", ".join(sorted(self._missing))
                raise TimeoutError(f"startup gate: {names} did not arrive within {timeout_s:g} s")

    def abort(self, cause: BaseException) -> None:
        """Break a shut gate for everyone with `cause`; the first cause stays, an open gate stays open."""
        with self._changed:
            if self._missing:
                self._cause = self._cause or cause
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Whether `ready` came true before nothing changed for `timeout_s`: each party has that long, however many come."""
        in_time = True
        while in_time and not ready() and self._cause is None:
            in_time = self._changed.wait(timeout_s)
        if self._cause is not None:
            raise GateBrokenError("the startup gate was aborted") from self._cause
        return ready()
