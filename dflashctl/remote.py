"""How a command reaches a host: argv and standard input go in, exit code, stdout and stderr come out.

One `Remote` per command of ours, reused for every call it makes. Nothing here knows about scripts, containers or runs; SSH has
a file of its own, which alone imports fabric and paramiko.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from dflashctl.errors import HostError, RemoteTimeoutError


@dataclass(frozen=True, slots=True)
class Completed:
    """What a command on the host left behind; `exit_code` is None when the connection broke before it was known."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes


class Remote(Protocol):
    """A way to one host."""

    @property
    def user(self) -> str:
        """Who we are there."""
        ...

    def exchange(self, argv: Sequence[str], stdin: bytes, opening: bytes, timeout_s: float) -> Completed:
        """Run `argv` and drain both its outputs; raises HostError, RemoteTimeoutError.

        `stdin` is sent once `opening` was seen on stdout, so that nothing waits in a pipe for a host that comes back to life
        hours later, and is held open until the end, so that the other side notices when nobody listens any more.
        """
        ...

    def close(self) -> None:
        """Give the connection back."""
        ...


MOST_BYTES = 64 << 20
"""No answer of ours comes near it; a host that sends more is stopped before it fills this machine's memory."""


class LocalRemote:
    """This machine. A command gets its own session, so Ctrl-C reaches the command line alone and it decides what ends."""

    user = "root"  # nothing here asks for more rights than we have

    def exchange(self, argv: Sequence[str], stdin: bytes, opening: bytes, timeout_s: float) -> Completed:
        """Run `argv` as a child; it is always awake, so nothing waits for `opening`."""
        del opening
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise HostError(f"host local cannot start {argv[0]}: {error.strerror}") from error
        assert process.stdin
        assert process.stdout
        assert process.stderr
        readers = [_Reader(process.stdout), _Reader(process.stderr)]
        try:
            _feed(process.stdin, stdin)
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RemoteTimeoutError(f"host local did not answer within {timeout_s:.0f} s") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it left behind in its group
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            stdout, stderr = (reader.finish() for reader in readers)
        return Completed(code, stdout, stderr)

    def close(self) -> None:
        """Nothing to give back."""


class _Reader:
    """Drains one output in a thread of its own: a full pipe would stop the command."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._data = b""
        self._thread = threading.Thread(target=self._drain, name="drain", daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        self._data = self._stream.read()

    def finish(self) -> bytes:
        self._thread.join(timeout=10)
        self._stream.close()
        return self._data


def _feed(stream: IO[bytes], data: bytes) -> None:
    """Outputs are drained meanwhile, so this ends when the command reads or dies."""
    with contextlib.suppress(BrokenPipeError):
        stream.write(data)
        stream.flush()
