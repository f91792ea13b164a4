"""One verb on several hosts, side by side: each in a thread with a session of its own, so that a dead host holds up nobody.

A module of its own because no other file starts threads for hosts. What a verb does on one host is that verb's; what is written
is written by the caller's thread alone.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflashctl.errors import DflashctlError, fault
from dflashctl.hosts import Host
from dflashctl.session import HostSession, open_session

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What a verb came to on one host: a value or an error."""

    host: Host
    value: T | None
    error: DflashctlError | None = None


def side_by_side(hosts: Sequence[Host], verb: Callable[[HostSession], T]) -> Iterator[Outcome[T]]:
    """Run `verb` on every host at once; yields the outcomes as they come in.

    Threads are daemons: Ctrl-C does not wait for a host that hangs. A verb's own time limits bound the wait for it.
    """
    done: queue.SimpleQueue[Outcome[T] | BaseException] = queue.SimpleQueue()

    def ask(host: Host) -> None:
        try:
            with open_session(host) as session:
                done.put(Outcome(host, verb(session)))
        except DflashctlError as error:
            done.put(Outcome(host, None, error))
        except BaseException as error:  # noqa: BLE001 - a fault of ours at one host, which takes no other's answer away
            if os.environ.get("DFLASHCTL_DEBUG"):
                done.put(error)
            else:
                done.put(Outcome(host, None, fault(error)))

    for host in hosts:
        threading.Thread(target=ask, args=(host,), name=f"host {host.name}", daemon=True).start()
    for _ in hosts:
        outcome = done.get()
        if isinstance(outcome, BaseException):
            raise outcome
        yield outcome
