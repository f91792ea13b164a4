"""The door of every program in this package: one JSON request in, one JSON answer out, a fault as one sentence."""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any, Callable, Dict

Verb = Callable[[Dict[str, Any]], Dict[str, Any]]

_ROOM = {errno.ENOSPC: "is full", errno.EDQUOT: "is over its quota"}
_DENIED = {errno.EACCES: "is not writable", errno.EPERM: "is not writable", errno.EROFS: "is read-only"}


class Fault(Exception):
    """What the user is told; `code` is the code word of one of the command line's errors."""

    def __init__(self, code: str, message: str, hint: str | None = None, **details: Any) -> None:
        """Keep the code word, the sentence, the hint and what --json shows beside them."""
        super().__init__(message)
        self.code = code
        self.hint = hint
        self.details = details


def serve(verbs: dict[str, Verb]) -> None:
    """Read one request `{"verb": ..., "args": {...}}` (a line) from standard input and answer on standard output."""
    request = json.loads(sys.stdin.buffer.readline())
    try:
        answer = {"result": verbs[request["verb"]](request["args"])}
    except Fault as fault:
        answer = {"fault": {"code": fault.code, "message": str(fault), "hint": fault.hint, "details": fault.details}}
    except OSError as error:
        answer = {"fault": {"code": "environment", "message": explain(error, request["args"].get("root")), "hint": None}}
    except Exception as error:  # noqa: BLE001 - the outermost frame: a sentence there beats a traceback that nobody reads
        answer = {"fault": {"code": "environment", "message": f"{request['verb']} failed: {error!r}", "hint": None}}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def explain(error: OSError, root: str | None) -> str:
    """An OSError as a sentence that names the place and, where it is the root's, what is wrong with the root."""
    place = error.filename or root or "the host"
    where = f"root {root}" if root and str(place).startswith(root) else str(place)
    for table in (_ROOM, _DENIED):
        if error.errno in table:
            return f"{where} {table[error.errno]} ({place}: {os.strerror(error.errno)})"
    return f"{place}: {error.strerror or error}"


def require_python(minimum: str) -> None:
    """Refuse an interpreter older than `minimum` ("3.11")."""
    major, minor = (int(part) for part in minimum.split("."))
    if sys.version_info < (major, minor):
        got = "{}.{}.{}".format(*sys.version_info[:3])
        raise Fault("environment", f"python {sys.executable} is {got}; the trainer needs {minimum} or newer")
