"""YAML as people mean it: a small subset of YAML 1.2, read without surprises.

A module of its own because hosts.yaml, experiments and `--set` must agree on what `no`, `3e-4` or `0200` is. Only
`true` and `false` are booleans; numbers are decimal; `1:30` is text; a number with a leading zero, a repeated key, an
anchor, an alias or a tag is refused with its line. Pure apart from reading the one file; any thread may call it.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, cast

import yaml

from dflashctl.errors import ConfigurationError

MAX_BYTES: Final = 1 << 20
"""No configuration of ours is longer; PyYAML would take minutes over a large file."""

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")


def load(path: Path, where: str | None = None) -> dict[str, object]:
    """The mapping that `path` holds; errors call the file `where` (default: its path). Raises ConfigurationError."""
    where = where or str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{where}: cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise ConfigurationError(f"{where}: must be at most {MAX_BYTES} bytes, got more")
    try:
        return load_text(data.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{where}:{line}: must be UTF-8 text, got byte 0x{data[error.start]:02x}") from None


def load_text(text: str, where: str) -> dict[str, object]:
    """The mapping that `text` holds; raises ConfigurationError."""
    value = _load(text, lambda line: f"{where}:{line}")
    if not isinstance(value, dict):
        got = "nothing" if value is None else shown(value)
        raise ConfigurationError(f"{where}: the top level must be a mapping (key: value), got {got}")
    return value


def parse_scalar(text: str, where: str) -> object:
    """One value as `--set KEY=VALUE` gives it: text, number, boolean, null or a flow list such as `[cpu, cpu]`.

    Raises ConfigurationError.
    """
    return _load(text, lambda _: where)


def shown(value: object) -> str:
    """A value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str) -> str:
    """`did you mean 'x'?` if a known word is near, else `<otherwise> a, b, c`."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"{otherwise} {', '.join(known) or 'none'}"


def mapping(where: str, value: object, known: Iterable[str] | None = None) -> dict[str, object]:
    """`value` as a mapping, its keys among `known` if given; null is an empty one. Raises ConfigurationError."""
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where} must be a mapping, got {shown(value)}")
    known = list(value if known is None else known)
    for key in value:
        if key not in known:
            raise ConfigurationError(f"{where}: unknown key {shown(key)}; {did_you_mean(key, known, otherwise='keys are')}")
    return value


def text(where: str, value: object) -> str:
    """`value` as non-empty text without control characters; raises ConfigurationError."""
    if not isinstance(value, str) or not value.strip():
        quote = f'; quote it: "{value}"' if isinstance(value, int | float) else ""
        raise ConfigurationError(f"{where} must be text, got {shown(value)}{quote}")
    if any(ord(c) < 32 and c not in "\n\t" for c in value):
        raise ConfigurationError(f"{where} must be text without control characters, got {shown(value)}")
    return value


def whole(where: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as a whole number in its range; raises ConfigurationError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        bounds = f"of {low} or more" if high is None else f"of {low}..{high}"
        raise ConfigurationError(f"{where} must be a whole number {bounds}, got {shown(value)}")
    return value


def gpu_indices(where: str, value: object) -> tuple[int, ...]:
    """`value` as a list of different GPU indices, in the order given; raises ConfigurationError."""
    if not isinstance(value, list):
        raise ConfigurationError(f"{where} must be a list of GPU indices, got {shown(value)}")
    indices = tuple(whole(f"{where}[{i}]", item, 0) for i, item in enumerate(value))
    if len(set(indices)) < len(indices):
        raise ConfigurationError(f"{where} must name each GPU once, got {shown(value)}")
    return indices


class _Loader(yaml.BaseLoader):
    """Composes nodes without resolving anything; refuses what makes one node stand for another."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        kind = "alias" if isinstance(event, yaml.AliasEvent) else "anchor"
        for name, got in ((kind, getattr(event, "anchor", None)), ("tag", getattr(event, "tag", None))):
            if got:
                problem = f"{name} '{got}' is not supported; quote it if it is text"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=cast(yaml.Mark, event.start_mark))
        return super().compose_node(parent, index)


def _load(text: str, at: Callable[[int], str]) -> object:
    """The plain value of `text`; `at(line)` is how errors name a place."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _plain(node, at)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigurationError(f"{at(mark.line + 1 if mark else 1)}: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigurationError(f"{at(line)}: must be printable text, got {chr(error.character)!r}") from None
    except RecursionError:
        raise ConfigurationError(f"{at(1)}: is nested too deeply") from None
    except ValueError as error:  # an escape of a character that there is not
        raise ConfigurationError(f"{at(1)}: is not YAML that can be read: {error}") from None


def _plain(node: yaml.Node, at: Callable[[int], str]) -> object:
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, at) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, at)
    # style is None for a plain scalar; quoted and block scalars are text, whatever they look like
    scalar = cast(yaml.ScalarNode, node)
    return scalar.value if scalar.style is not None else _resolve(scalar.value, at(scalar.start_mark.line + 1))


def _plain_mapping(node: yaml.MappingNode, at: Callable[[int], str]) -> dict[str, object]:
    result: dict[str, object] = {}
    first_line: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = _plain(key_node, at)
        if not isinstance(key, str):
            raise ConfigurationError(f"{at(line)}: a key must be text, got {shown(key)}")
        if key in result:
            raise ConfigurationError(f"{at(line)}: key {shown(key)} is already set in line {first_line[key]}")
        first_line[key] = line
        result[key] = _plain(value_node, at)
    return result


def _resolve(word: str, where: str) -> object:
    """What a plain (unquoted) word means."""
    if _NULL.fullmatch(word):
        return None
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    if _LEADING_ZERO.fullmatch(word):
        raise ConfigurationError(
            f"{where}: a number must not start with 0 (older YAML reads {word} as octal), got {word}; "
            f'drop the zero, or quote it for text: "{word}"'
        )
    if not _FLOAT.fullmatch(word):
        return word
    number = float(word)
    if not math.isfinite(number):
        raise ConfigurationError(f"{where}: {shown(word)} is too large for a number")
    return int(word) if _INT.fullmatch(word) else number
