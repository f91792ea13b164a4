"""The values of --env-file: in a file of the run that only its owner reads, and masked wherever its log is shown.

They come on standard input like everything else, so no command line and no record ever holds one.
"""

from __future__ import annotations

import os
import re
import shlex

from dflashctl.onhost.layout import RunFolder

SHORTEST = 4
"""Characters that a value needs to be masked: `1` or `on` is no secret, and would be masked out of every number."""
_MASK = b"***"


def write(folder: RunFolder, values: dict[str, str]) -> None:
    """Write what run.sh reads."""
    text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
    with open(os.open(folder.secrets, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def mask(folder: RunFolder, data: bytes) -> bytes:
    """`data` of the run's log without the values."""
    values = _values(folder)
    return re.sub(b"|".join(map(re.escape, values)), _MASK, data) if values else data


def whole_lines(folder: RunFolder, data: bytes) -> bytes:
    """Of a piece of a log what can be masked by itself: a value never spans lines, but may span two pieces."""
    end = data.rfind(b"\n") + 1
    return data[:end] if end and _values(folder) else data


def _values(folder: RunFolder) -> list[bytes]:
    try:
        words = shlex.split(folder.secrets.read_text())
    except (OSError, ValueError):
        return []
    values = {word.partition("=")[2] for word in words if "=" in word}
    return sorted((value.encode() for value in values if len(value) >= SHORTEST), key=len, reverse=True)
