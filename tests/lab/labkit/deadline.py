"""Waiting in the lab: poll until something is true, never sleep and hope. Any thread may call this."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class LabError(Exception):
    """The lab itself is broken (not the code under test); the text says what and shows the log that tells why."""


def wait_until(check: Callable[[], T], what: str, timeout_s: float = 30.0) -> T:
    """Poll `check` until it gives something true and return that; after `timeout_s` raise LabError naming `what`."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.002
    while True:
        result = check()
        if result:
            return result
        if time.monotonic() > deadline:
            raise LabError(f"waited {timeout_s:g} s in vain for: {what}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
