"""The test's side of the `pct` stand-in: how it misbehaves, and what was asked of it."""

from pathlib import Path

from labkit.node import STATE, Node

PROGRAM = Path(__file__).parents[1] / "pct"


class Pct:
    """Settings of the stand-in; each is a file on the node that the program reads on every call."""

    def __init__(self, node: Node) -> None:
        """Install the program on the node."""
        self._directory = node.path(f"{STATE}/pct")
        node.install(PROGRAM, "/usr/sbin/pct")

    def dies_with(self, status: int) -> None:
        """Set the exit status of `die` (stopped, unknown id...): Perl's errno of the moment, so 255, 25 or 2."""
        self._set("die_status", str(status))

    def says_first(self, text: str) -> None:
        """Print this on stderr at every call, as Perl does when the client's locale is not installed."""
        self._set("noise", text)

    def keeps_environment(self, keep: bool) -> None:
        """Set what `exec` does without --keep-env: today's default keeps the caller's environment, a later one may not."""
        self._set("keep_env", str(int(keep)))

    def copies_take(self, seconds: float, *, lock_wait_s: float = 10) -> None:
        """Make push and pull hold the lock this long, and wait that long for a lock that another one holds."""
        self._set("copy_takes_s", str(seconds))
        self._set("lock_wait_s", str(lock_wait_s))

    def calls(self) -> list[list[str]]:
        """List the words of every call since the last reset; `exec` calls are the round trips into a container."""
        log = self._directory / "calls"
        fields = log.read_bytes().split(b"\0") if log.exists() else []
        calls, at = [], 0
        while at < len(fields) - 1:
            count = int(fields[at])
            calls.append([field.decode(errors="surrogateescape") for field in fields[at + 1 : at + 1 + count]])
            at += 1 + count
        return calls

    def reset(self) -> None:
        """Behave, and forget the calls."""
        for path in self._directory.iterdir():
            path.unlink()

    def _set(self, name: str, value: str) -> None:
        (self._directory / name).write_text(value)
