"""The values of --env-file: in a file of the run that only its owner reads, and masked wherever its log is shown.

They come on standard input like everything else, so no command line and no record ever holds one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from typing import Any

from dflashctl.onhost.layout import RunFolder

SHORTEST = 4
"""Characters that a value needs to be masked: `1` or `on` is no secret, and would be masked out of every number."""
_WORDS = frozenset({"true", "false", "none", "null"})
"""No secrets either."""
_MASK = b"***"


def write(folder: RunFolder, values: dict[str, str]) -> None:
    """Write what run.sh reads."""
    text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
    with open(os.open(folder.secrets, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def mask(folder: RunFolder, data: bytes, begin: int = 0, end: int | None = None) -> tuple[bytes, int]:
    """`data[begin:end]` without the values, and where it ends: after the value that would be cut in two there."""
    values, masked, at, last = _values(folder), b"", begin, len(data) if end is None else end
    for found in re.finditer(b"|".join(map(re.escape, values)), data) if values else ():
        if found.end() > begin and found.start() < last:
            masked += data[at : max(at, found.start())] + _MASK
            at = found.end()
    return masked + data[at:last], max(at, last)


def mask_all(folder: RunFolder, value: Any) -> Any:
    """A JSON value with the strings in it masked."""
    if isinstance(value, str):
        return mask(folder, value.encode())[0].decode(errors="replace")
    if isinstance(value, dict):
        return {key: mask_all(folder, item) for key, item in value.items()}
    return [mask_all(folder, item) for item in value] if isinstance(value, list) else value


def overlap(folder: RunFolder) -> int:
    """How many bytes two pieces of a log have to share, so that each value is whole in one of them."""
    return max(map(len, _values(folder)), default=1) - 1


def _values(folder: RunFolder) -> list[bytes]:
    """The values as they are, and as JSON and Python write them between quotes; the longest first."""
    try:
        words = shlex.split(folder.secrets.read_text())
    except (OSError, ValueError):
        return []
    values = {word.partition("=")[2] for word in words if "=" in word}
    secret = {value for value in values if len(value) >= SHORTEST and value.lower() not in _WORDS}
    forms = {form for value in secret for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1])}
    return sorted((form.encode() for form in forms), key=len, reverse=True)
