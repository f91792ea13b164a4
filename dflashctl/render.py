"""What people and programs see: the one place that writes to stdout and stderr, and the only importer of rich.

stdout is the answer (text, log bytes or one JSON document), stderr is progress, warnings and hints. Tables are for terminals;
anywhere else a record is a line of tab-separated values that nothing cuts.
"""

import codecs
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from dflashctl.errors import DflashctlError, EnvironmentFault, InterruptedByUser, StdoutClosed

if TYPE_CHECKING:
    from dflashctl.bundle import Deployment
    from dflashctl.launch import Launched

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
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class Renderer:
    """Writes one command's answer; with `as_json` everything but the document goes to stderr."""

    def __init__(self, as_json: bool) -> None:
        """Decide once where log bytes go and whether stdout is a terminal."""
        self.as_json = as_json
        self.is_terminal = bool(sys.stdout) and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def note(self, text: str) -> None:
        """Progress, a warning or a hint, on stderr."""
        if sys.stderr:
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()

    def document(self, content: dict[str, Any]) -> None:
        """The one JSON document."""
        _write(sys.stdout, json.dumps({"schema": 1} | content, indent=1) + "\n")

    def line(self, text: str) -> None:
        """One line of the answer."""
        _write(sys.stdout, printable(text) + "\n")

    def log(self, data: bytes) -> None:
        """Log bytes as they come; a character split between two chunks is put together, control sequences are left out."""
        stream = sys.stderr if self.as_json else sys.stdout
        text = self._decoder.decode(data)
        _write(stream, _CONTROL.sub("", text) if stream and stream.isatty() else text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rows of values; None reads `-`, and a state has its colour on a terminal."""
        texts = [[printable("-" if value is None else str(value)) for value in row] for row in rows]
        if not self.is_terminal:
            for row in texts:
                self.line("\t".join(text.replace("\t", " ").replace("\n", " ") for text in row))
            return
        from rich.console import Console  # a tenth of a second that only terminals need
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, box=None, pad_edge=False)
        for row in texts:
            table.add_row(*(Text(text, style=_COLOURS.get(text, "")) for text in row))
        Console(soft_wrap=False).print(table)

    def failure(self, error: DflashctlError) -> None:
        """An error: a sentence and a hint for people, a document for programs."""
        if self.as_json:
            self.document(error.details | {"error": {"code": error.code, "message": str(error), "hint": error.hint}})
            return
        self.note(str(error) if isinstance(error, InterruptedByUser) else f"error: {error}")
        if error.hint:
            self.note(f"hint: {error.hint}")


def _write(stream: TextIO | None, text: str) -> None:
    """Write at once; raises StdoutClosed where nobody reads any more, EnvironmentFault where it cannot be written."""
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
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
        out.line(f"{done.host}: nothing to do, release {done.release} is active and intact ({done.files} files)")
        return
    if done.dry_run:
        out.line(f"{done.host}: would activate release {done.release} in place of {done.previous or 'none'}:")
    else:
        check = done.parse_check
        parsed = f", python {check.python} parses {check.files} files" if check else ""
        out.line(f"{done.host}: release {done.release} is active, {done.uploaded_bytes} bytes sent{parsed}; changed:")
    for path in done.changed:
        out.line(f"  {path}")


def launched(out: Renderer, done: "Launched") -> None:
    """A run that is under way, and what to type next."""
    if done.warning:
        out.note(f"warning: {done.warning}")
    for sentence in done.overridden:
        out.note(f"warning: --force overrides that {sentence}")
    if done.cleared_cache:
        out.note(f"emptied {done.cleared_cache}")
    if done.exit_code == 0:
        out.line(f"{done.run} on {done.host} has already finished, exit code 0")
    else:
        where = ", ".join(f"GPU {gpu.index}" for gpu in done.gpus) or "CPU"
        out.line(f"{done.run} is {done.state} on {done.host} ({where}), pid {done.pid}, {done.watched_s:.0f} s after its start")
    out.line(f"log: {done.log}")
    out.line(f"next: dflashctl tail {done.run}   dflashctl status {done.run}")


def status(out: Renderer, state: dict[str, Any]) -> None:
    """One run's state in a few lines."""
    out.line(f"{state['host']}:{state['run']} {describe(state)}")
    if state["started_at"]:
        ended = f", ended {state['ended_at']}" if state["ended_at"] else ""
        out.line(f"started {state['started_at']}{ended}, {_seconds(state['duration_s'])}, pid {state['pid']}")
    if state["last_event"]:
        step = f", step {state['step']}" if state["step"] is not None else ""
        out.line(f"last event {state['last_event']}, {_seconds(state['last_event_age_s'])} ago{step}")
    if state.get("error"):
        out.line(f"error: {state['error']}")


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


def verdict(out: Renderer, run: str, found: dict[str, Any]) -> None:
    """Go or no-go of a smoke run: first against later steps, peak memory, distance from an eager loop."""
    out.line(f"{run}: {'go' if found['go'] else 'no-go'}")
    for reason in found["reasons"]:
        out.line(f"  {reason}")
    for name, stage in found.get("stages", {}).items():
        first, later = (_with_unit(stage.get(key), " s") for key in ("first_step_s", "steady_step_s"))
        out.line(f"  {name} on {stage.get('device')}: first step {first}, later {later}")
    for device, gpu in found.get("gpus", {}).items():
        out.line(f"  {device}: peak {_with_unit(gpu.get('peak_gib'), ' GiB')}")
    if "loss_difference" in found:
        out.line(f"  losses differ from an eager loop's by {found['loss_difference']:.2g}")


def describe(state: dict[str, Any]) -> str:
    """State, with the code or signal that belongs to it."""
    if state["state"] == "exited":
        return f"exited {state['exit_code']}"
    if state["state"] == "killed" and state["signal"] is not None:
        return f"killed by signal {state['signal']}"
    if state["state"] == "lost":
        return "lost: its process is gone and left no exit code (killed hard, out of memory, or the host restarted)"
    return str(state["state"])


def _seconds(value: float | None) -> str:
    if value is None:
        return "unknown time"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
