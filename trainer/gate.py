"""The startup gate: workers prepare one at a time, none begins before all are ready, one that fails takes the others with it.

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
        """A shut gate; `on_open` runs once, in the last party's thread, before anybody passes."""
        self._missing = set(parties)
        self._preparing: str | None = None
        self._on_open = on_open
        self._changed = threading.Condition()
        self._cause: BaseException | None = None

    @contextlib.contextmanager
    def turn(self, party: str, *, timeout_s: float) -> Iterator[None]:
        """Prepare inside, alone; raises GateBrokenError, or TimeoutError that names who is still at it."""
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._preparing is None or self._cause is not None, timeout_s)
            self._raise_if_broken()
            if not in_time:
                raise TimeoutError(f"startup gate: {self._preparing} has been preparing for {timeout_s:g} s")
            self._preparing = party
        try:
            yield
        finally:
            with self._changed:
                self._preparing = None
                self._changed.notify_all()

    def pass_through(self, party: str, *, timeout_s: float) -> None:
        """Arrive, wait for the others, go on; raises GateBrokenError, or TimeoutError that names who is missing."""
        with self._changed:
            self._missing.remove(party)
            if not self._missing and self._cause is None:
                self._on_open()
                self._changed.notify_all()
            in_time = self._changed.wait_for(lambda: not self._missing or self._cause is not None, timeout_s)
            self._raise_if_broken()
            if not in_time:
                names = ", ".join(sorted(self._missing))
                raise TimeoutError(f"startup gate: {names} did not arrive within {timeout_s:g} s")

    def abort(self, cause: BaseException) -> None:
        """Break a shut gate for everyone with `cause`; the first cause stays, an open gate stays open."""
        with self._changed:
            if self._missing:
                self._cause = self._cause or cause
            self._changed.notify_all()

    def _raise_if_broken(self) -> None:
        if self._cause is not None:
            raise GateBrokenError("the startup gate was aborted") from self._cause
