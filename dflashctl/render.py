"""What people and programs see: the one place that writes to stdout and stderr, and the only importer of rich.

stdout is the answer (text, log bytes or one JSON document), stderr is progress, warnings and hints. Tables are for terminals;
anywhere else a record is a line of tab-separated values that nothing cuts.
"""

import codecs
import json
import os
import re
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from dflashctl.errors import DflashctlError, EnvironmentFault, InterruptedByUser, StdoutClosed

if TYPE_CHECKING:
    from dflashctl.bundle import Deployment
    from dflashctl.doctor import Check
    from dflashctl.environment import Environment
    from dflashctl.launch import Launched
    from dflashctl.transfer import Moved

_COLOURS = {
    "idle": "green",
    "running": "green",
    "starting": "cyan",
    "busy": "yellow",
    "stopped": "yellow",
    "unknown": "magenta",
    "killed": "red",
    "lost": "red",
}
_CSI, _STRING, _CHARS = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*",
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\r\n]*",
    r"\x1b[ -/]*",
)
_CONTROL = re.compile(rf"{_CSI}[@-~]|{_STRING}(?:\x07|\x1b\\|\x9c)?|{_CHARS}[0-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Control sequences of ECMA-48: CSI, strings (a window's title) that end with their line at the latest, the rest."""

_UNFINISHED = re.compile(rf"(?:{_CSI}|{_STRING}\x1b?|{_CHARS})\Z")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_HELD_BACK = 4096
_UNBOUNDED = 10_000
_LINE_BYTES = 1 << 20
_PROGRESS_S = 2.0


class Renderer:
    """Writes one command's answer; with `as_json` everything but the document goes to stderr."""

    def __init__(self, as_json: bool) -> None:
        """Decide once whether stdout is a terminal."""
        self.as_json = as_json
        self.is_terminal = bool(sys.stdout) and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._prefix = ""

    def prefixed(self, host: str) -> "Renderer":
        """The same with the host's name in front of each line."""
        other = Renderer(self.as_json)
        other._prefix = f"{host}: "
        return other

    def note(self, text: str) -> None:
        """Progress, a warning or a hint, on stderr; where nobody reads it any more, that decides nothing."""
        with suppress(OSError, ValueError):
            if sys.stderr:
                sys.stderr.write(printable(text) + "\n")
                sys.stderr.flush()

    def document(self, content: dict[str, Any]) -> None:
        """A JSON document, on one line, for `tail --json` writes several."""
        _write(sys.stdout, json.dumps({"schema": 1} | content) + "\n")

    def line(self, text: str) -> None:
        """One line of the answer."""
        _write(sys.stdout, self._prefix + printable(text) + "\n")

    def log(self, as_documents: bool = False) -> "LogStream":
        """Where a log goes: to stdout (to stderr where that is one document's), or to stdout as a document for each line."""
        if as_documents:
            return _LogDocuments(self)
        return LogStream(sys.stderr if self.as_json else sys.stdout)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], wrapped: int = -1) -> None:
        """Rows of values; None reads `-`, and a state has its colour on a terminal, where one column is `wrapped`."""
        texts = [[printable("-" if value is None else str(value)) for value in row] for row in rows]
        if not self.is_terminal:
            for row in texts:
                self.line("\t".join(text.replace("\t", " ").replace("\n", " ") for text in row))
            return
        from rich.cells import cell_len
        from rich.console import Console  # a tenth of a second that only terminals need
        from rich.table import Column, Table
        from rich.text import Text

        # only one column, of sentences, is wrapped; a terminal too narrow for the others breaks lines, which cuts no name
        widths = [max(map(cell_len, cells)) for cells in zip(columns, *texts, strict=True)]
        heads = [Column(name, no_wrap=True, min_width=width) for name, width in zip(columns, widths, strict=True)]
        heads[wrapped] = Column(columns[wrapped], overflow="fold")
        table = Table(*heads, box=None, pad_edge=False)
        for row in texts:
            table.add_row(*(Text(text, style=_COLOURS.get(text, "")) for text in row))
        console = Console()
        unbounded = console.options.update(max_width=_UNBOUNDED)
        console.width = max(console.width, console.measure(table, options=unbounded).minimum)
        console.print(table)

    def failure(self, error: DflashctlError) -> None:
        """An error: a sentence and a hint for people, a document for programs."""
        if self.as_json:
            self.document(error.details | {"error": error.document()})
            return
        self.note(str(error) if isinstance(error, InterruptedByUser) else f"error: {error}")
        if error.hint:
            self.note(f"hint: {error.hint}")

    def failed_host(self, host: str, error: DflashctlError) -> None:
        """What went wrong on one of several hosts; it is in the document too."""
        hint = f"\nhint: {error.hint}" if error.hint else ""
        self.note("\n".join(f"{host}: {line}" for line in f"error: {error}{hint}".splitlines()))


class LogStream:
    """A log's bytes as they come: unchanged into a file or pipe, on a terminal as text without control sequences.

    Where a chunk ends within a character or a control sequence, that waits for the rest.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Write to `stream`."""
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, data: bytes) -> None:
        """Show what came; nothing came: raises StdoutClosed if whoever read it is gone."""
        if self._stream is None:
            return
        if not self._stream.isatty():
            _write_bytes(self._stream, data)
            return
        text = self._held + self._decoder.decode(data)
        unfinished = _UNFINISHED.search(text, max(0, len(text) - _HELD_BACK))
        whole = unfinished.start() if unfinished else len(text)
        self._held = text[whole:]
        _write(self._stream, printable(text[:whole]))

    def end(self) -> None:
        """Show what was held back."""
        _write(self._stream, printable(self._held + self._decoder.decode(b"", final=True)))


class _LogDocuments(LogStream):
    """A log as one JSON document a line; of a line of more than 1 MiB each MiB is one."""

    def __init__(self, out: Renderer) -> None:
        super().__init__(sys.stdout)
        self._out = out
        self._pending = b""

    def feed(self, data: bytes) -> None:
        if not data:
            super().feed(b"")
        text = self._pending + data
        half = text.endswith(b"\r")  # a \n may follow
        *lines, self._pending = _LINE_END.split(text[:-1] if half else text)
        self._pending += b"\r" if half else b""
        while len(self._pending) > _LINE_BYTES:
            lines.append(self._pending[:_LINE_BYTES])
            self._pending = self._pending[_LINE_BYTES:]
        for line in lines:
            self._document(line)

    def end(self) -> None:
        if self._pending:
            self._document(self._pending.removesuffix(b"\r"))

    def _document(self, line: bytes) -> None:
        self._out.document({"line": line.decode(errors="replace")})


def _write_bytes(stream: TextIO, data: bytes) -> None:
    """Write bytes as they are. To write nothing asks whether anybody reads, for a silent pipe tells it no other way."""
    if not data and _is_left(stream):
        raise StdoutClosed
    with _output():
        stream.flush()
        stream.buffer.write(data)
        stream.flush()


def _is_left(stream: TextIO) -> bool:
    """Whether the other end of a pipe is closed."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _write(stream: TextIO | None, text: str) -> None:
    """Write text at once."""
    if stream is None:
        return
    with _output():
        stream.write(text)
        stream.flush()


@contextmanager
def _output() -> Iterator[None]:
    """Raises StdoutClosed where nobody reads any more, EnvironmentFault where it cannot be written."""
    try:
        yield
    except BrokenPipeError:
        raise StdoutClosed from None
    except OSError as error:
        raise EnvironmentFault(f"the output cannot be written: {error.strerror}") from None


def printable(text: str) -> str:
    """Text without control sequences: what a host sends must not drive this terminal."""
    return _CONTROL.sub("", text)


def deployment(out: Renderer, done: "Deployment") -> None:
    """What a deploy did, for people."""
    if done.uploaded_bytes == 0 and not done.changed:
        out.line(f"nothing to do, release {done.release} is active and intact ({done.files} files)")
        return
    if done.dry_run:
        out.line(f"would activate release {done.release} in place of {done.previous or 'none'}:")
    else:
        check = done.parse_check
        parsed = f", python {check.python} parses {check.files} files" if check else ""
        out.line(f"release {done.release} is active, {done.uploaded_bytes} bytes sent{parsed}; changed:")
    for path in done.changed:
        out.line(f"  {path}")


def launching(out: Renderer) -> Callable[[str, Any], None]:
    """Says each step of a launch as it is taken, and once what it waits for."""
    waiting = ""

    def report(what: str, value: Any) -> None:
        nonlocal waiting
        if what == "deployed":
            out.note(f"release {value.release}: {'sent' if value.uploaded_bytes else 'already there, intact'}")
        elif what == "gpus" and value:
            out.note("GPUs " + ", ".join(f"{gpu.index} ({gpu.name})" for gpu in value))
        elif what == "doubt":
            out.note(f"warning: who else is at them is not known: {value}")
        elif (
            what == "waiting" and (gist := re.sub(r"\d+ (MiB|%)", "", str(value))) != waiting
        ):  # numbers change with every look
            waiting = gist
            out.note(f"waiting: {value}")

    return report


def doubts(out: Renderer, done: "Launched") -> None:
    """What speaks against a run that has been started all the same."""
    if done.warning:
        out.note(f"warning: {done.warning}")
    for sentence in done.overridden:
        out.note(f"warning: --force overrides that {sentence}")


def launched(out: Renderer, done: "Launched") -> None:
    """A run that is under way, and what to type next."""
    doubts(out, done)
    if done.cleared_cache:
        out.note(f"emptied {done.cleared_cache}")
    if done.exit_code == 0:
        out.line(f"{done.run} on {done.host} has already finished, exit code 0")
    else:
        where = ", ".join(f"GPU {gpu.index}" for gpu in done.gpus) or "CPU"
        out.line(f"{done.run} is {done.state} on {done.host} ({where}), pid {done.pid}, {done.watched_s:.0f} s after its start")
    out.line(f"log: {done.log}")
    out.line(f"next: dflashctl tail {done.run}   dflashctl status {done.run}")


def progress(out: Renderer) -> Callable[[str, int, int], None]:
    """Says now and then how far a transfer is, how fast, and how long it will still take."""
    begun = said = time.monotonic()
    before: int | None = None

    def tell(name: str, done: int, total: int) -> None:
        nonlocal said, before
        before = done if before is None else before
        now = time.monotonic()
        if now - said < _PROGRESS_S:
            return
        said, rate = now, (done - before) / (now - begun)
        left = f", {_seconds((total - done) / rate)} left" if rate > 0 else ""
        out.note(f"{name}: {_size(done)} of {_size(total)}, {_size(rate)}/s{left}")

    return tell


def moved(out: Renderer, done: "Moved") -> None:
    """What a transfer did."""
    same = "" if done.bytes_moved else ", all there already"
    out.line(
        f"{done.source} -> {done.dest}: {done.files} files, {_size(done.bytes_total)}; {_size(done.bytes_moved)} moved{same}"
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 1024:.1f} KiB"


def status(out: Renderer, state: dict[str, Any]) -> None:
    """One run's state in a few lines."""
    out.line(f"{state['host']}:{state['run']} {describe(state)}")
    if state["started_at"]:
        ended = f", ended {state['ended_at']}" if state["ended_at"] else ""
        out.line(f"started {state['started_at']}{ended}, {_seconds(state['duration_s'])}, pid {state['pid']}")
    if state["progress"]:
        out.line(_far(state["progress"]))
    if state["last_event"]:
        step = f", step {state['step']}" if state["step"] is not None else ""
        out.line(f"last event {state['last_event']}, {_seconds(state['last_event_age_s'])} ago{step}")
    if state.get("error"):
        out.line(f"error: {state['error']}")


def living(out: Renderer, states: Sequence[dict[str, Any]]) -> None:
    """The living runs of one host."""
    for state in states:
        step = f", step {state['step']}" if state["step"] is not None else ""
        far = f", {_far(state['progress'])}" if state["progress"] else ""
        since = f"{_seconds(state['duration_s'])}, pid {state['pid']}{step}{far}"
        out.line(f"{state['run']} {describe(state)}, {since}, launched by {state['launched_by'] or 'somebody'}")
    if not states:
        out.line("no run is living")


def _far(progress: dict[str, Any]) -> str:
    """How far a preparation is, and of one that moves how fast."""
    answered = f"{progress.get('done')} of {progress.get('total')} conversations answered"
    if progress.get("conversations_per_s") is None:
        return answered
    rates = f"{_measured(progress.get('conversations_per_s'), '/s')}, {_measured(progress.get('tokens_per_s'), ' tokens/s')}"
    left = progress.get("remaining_s")
    return f"{answered}, {rates}, {_seconds(left)} left"


def stopped(state: dict[str, Any]) -> str:
    """What became of a run that was to be stopped."""
    left = f"; {state['leftovers']} processes that it had left behind were ended" if state.get("leftovers") else ""
    already = "had already ended: " if state["already"] else ""
    return f"{state['host']}:{state['run']} {already}{describe(state)}{left}{_reservations(state)}"


def _reservations(state: dict[str, Any]) -> str:
    return "".join(f"; {state[name]}" for name in ("memory", "warning") if state.get(name))


def stopped_each(out: Renderer, states: Sequence[dict[str, Any]]) -> None:
    """The runs of one host that were stopped."""
    for state in states:
        out.line(f"{state['run']} {describe(state)}{_reservations(state)}")
    if not states:
        out.line("no run of yours is living")


def gpus(out: Renderer, documents: Sequence[dict[str, Any]], clear: bool) -> None:
    """One line a GPU, as people know it from gpustat; what is unknown reads `-`."""
    if clear and out.is_terminal:
        sys.stdout.write("\x1b[H\x1b[2J")
    rows = [
        (
            document["host"],
            gpu["index"],
            gpu["name"],
            _with_unit(gpu["temperature_c"], " C"),
            _with_unit(gpu["utilization_percent"], " %"),
            _with_unit(gpu["power_w"], " W"),
            f"{_with_unit(gpu['memory_used_mib'], '')} / {_with_unit(gpu['memory_total_mib'], ' MiB')}",
            gpu["state"],
            gpu["reason"],
        )
        for document in documents
        for gpu in document["gpus"]
    ]
    if rows:
        out.table(("host", "gpu", "name", "temp", "util", "power", "memory", "state", "why"), rows)
    for document in documents:
        if document["error"] or document["note"]:
            out.note(f"{document['host']}: {document['error'] or document['note']}")


def _with_unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value}{unit}"


def _measured(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.3g}{unit}"


def environment(out: Renderer, done: "Environment") -> None:
    """The environment that a host has now, and what is left to do."""
    packages = ", ".join(f"{name} {version}" for name, version in done.packages.items())
    how = f"made with {done.tool}" if done.made else "nothing to do"
    out.line(f"{done.python}: {how}; {packages}; fingerprint {done.fingerprint}")
    for name in done.pruned:
        out.line(f"removed venvs/{name}, which no run uses")
    if not done.is_named:
        out.line(f"set hosts.{done.host}.python to {done.python}, so that runs use it")


def checks(out: Renderer, found: "Sequence[Check]") -> None:
    """What the doctor found: each check with a command that shows the same, and the fix where there is one to make."""
    for check in found:
        out.line(f"{check.state:<8} {check.name}: {check.found}")
        out.line(f"           $ {check.command}")
        if check.fix:
            out.line(f"           fix: {check.fix}")
    counts = Counter(check.state for check in found)
    out.line(", ".join(f"{counts[state]} {state}" for state in ("ok", "warning", "failed", "unknown") if counts[state]))


def verdict(out: Renderer, run: str, found: dict[str, Any]) -> None:
    """Go or no-go of a smoke run: first against later steps, peak memory, distance from an eager loop."""
    out.line(f"{run}: {'go' if found['go'] else 'no-go'}")
    for reason in found["reasons"]:
        out.line(f"  {reason}")
    for name, stage in found.get("stages", {}).items():
        keys = ("compile_s", "capture_s", "first_step_s", "steady_step_s")
        compiled, captured, first, later = (_measured(stage.get(key), " s") for key in keys)
        how = f"compiled in {compiled}, captured in {captured}, first step {first}, later {later}"
        out.line(f"  {name} on {stage.get('device')}: {how}")
    for device, gpu in found.get("gpus", {}).items():
        out.line(f"  {device}: peak {_measured(gpu.get('peak_gib'), ' GiB')}")
    if "loss_difference" in found:
        out.line(f"  losses differ from an eager loop's by {found['loss_difference']:.2g}")


def acceptance(out: Renderer, run: str, found: dict[str, Any]) -> None:
    """What a drafter is worth."""
    length, speeds = found["acceptance_length"], found["tokens_per_s"]
    interval = "" if length["interval_95"] is None else " ({:.2f} to {:.2f}, 95 %)".format(*length["interval_95"])
    count = f"{length['verifications']} verifications of {length['prompts']} prompts"
    out.line(f"{run}: acceptance length {_measured(length['mean'], '')}{interval}, {count}")
    rates = " against ".join(_measured(speeds[way], "") for way in ("speculative", "plain"))
    out.line(f"  {_measured(found['speedup'], '')} times plain decoding: {rates} tokens/s")
    shares = ", ".join(f"{row['position']}: {_measured(row['share'], '')}" for row in found["accepted_by_position"])
    out.line(f"  accepted by position: {shares}")
    if found["equal_to_plain"] is not None:
        out.line(f"  {found['equal_to_plain']} of {found['prompts']['count']} responses equal plain decoding's")


def describe(state: dict[str, Any]) -> str:
    """State, with the code or signal that belongs to it."""
    if state["state"] == "exited":
        return f"exited {state['exit_code']}"
    if state["state"] == "killed" and state["signal"] is not None:
        memory = ": out of memory, the kernel says" if state["signal"] == signal.SIGKILL and state.get("oom_kills") else ""
        return f"killed by signal {state['signal']}{memory}"
    if state["state"] == "lost":
        return "lost: its process is gone and left no exit code (killed hard, out of memory, or the host restarted)"
    if state.get("stalled"):
        return f"{state['state']}, stalled: it has not moved for longer than it should; dflashctl tail {state['run']}"
    return str(state["state"])


def _seconds(value: float | None) -> str:
    if value is None:
        return "unknown time"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
