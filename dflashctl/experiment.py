"""experiments/<tag>.yaml, its parents and `--set` -> one checked `Experiment`.

A module of its own because a hypothesis is more than a configuration: it has a parent that it changes, an
expectation, and a place to run. The parents' `trainer:` is merged under the child's, section by section and key by
key; lists are replaced whole. `host` and `gpus` come from the nearest ancestor that names them, so that a child runs
where the run that it is compared with ran; `hypothesis`, `change` and `expect` are each file's own. Reads files only;
any thread may call it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from dflashctl import strict_yaml
from dflashctl.errors import ConfigurationError
from trainer.config import TrainConfig, keys
from trainer.errors import ConfigError

DEFAULT: Final = "default"
SET: Final = "--set"

_TAG = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_PROSE = ("hypothesis", "parent", "change", "host")
_TOP = (*_PROSE, "gpus", "expect", "trainer")
_KEYS = {section: [key for _, key in pairs] for section, pairs in groupby((k.split(".") for k in keys()), itemgetter(0))}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One hypothesis, ready to launch."""

    tag: str
    path: Path
    hypothesis: str
    """What it is about, for people; empty if the file does not say."""
    parent: str | None
    change: str
    """What it does differently from its parent; empty if the file does not say."""
    host: str | None
    gpus: tuple[int, ...] | int | None
    """GPU indices of the host, or how many; None: as many as the devices of `trainer.pipeline` need."""
    expect: tuple[str, ...]
    trainer: Mapping[str, Mapping[str, Any]]
    """What files and overrides set, merged; defaults are not spelled out."""
    origins: Mapping[str, str]
    """Where each set key came from: `draft.block_size` (`host`, `gpus`) -> `experiments/fixedshape.yaml` or `--set`."""
    config: TrainConfig
    """`trainer` with its defaults, checked."""


def check_tag(tag: str) -> str:
    """`tag` itself; raises ConfigurationError with a valid form if it is none."""
    if _TAG.fullmatch(tag):
        return tag
    valid = re.sub(r"[^a-z0-9_-]+", "-", tag.lower()).strip("-_")[:64]
    hint = f"; try '{valid}'" if valid else ""
    raise ConfigurationError(f"a tag must match {_TAG.pattern}, got {strict_yaml.shown(tag)}{hint}")


def load_experiment(tag: str, folder_or_file: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Experiment `tag` from its folder (`<tag>.yaml`) or from one file, whose parents lie beside it.

    `overrides` are `SECTION.KEY=VALUE`, applied in order. Raises ConfigurationError.
    """
    is_file = folder_or_file.is_file() or folder_or_file.suffix in (".yaml", ".yml")
    check_tag(tag)
    chain = _chain(folder_or_file if is_file else folder_or_file / f"{tag}.yaml")
    child = chain[0]
    trainer: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for file in reversed(chain):
        origins |= {key: file.where for key in ("host", "gpus") if getattr(file, key) is not None}
        _lay(file.trainer, file.where, trainer, origins)
    for override in overrides:
        _lay(_parse_override(override), SET, trainer, origins)
    return Experiment(
        tag=tag,
        path=child.path,
        hypothesis=child.hypothesis,
        parent=child.parent,
        change=child.change,
        host=next((file.host for file in chain if file.host is not None), None),
        gpus=next((file.gpus for file in chain if file.gpus is not None), None),
        expect=child.expect,
        trainer=trainer,
        origins=origins,
        config=_build(trainer, origins, child.where, overrides),
    )


def describe(experiment: Experiment) -> list[tuple[str, object, str]]:
    """Every (key, value, origin) that `dflashctl show` prints: first the experiment's own keys, then the trainer's."""
    own = _where(experiment.path)
    gpus = list(experiment.gpus) if isinstance(experiment.gpus, tuple) else experiment.gpus
    rows: list[tuple[str, object, str]] = [("tag", experiment.tag, own)]
    for key in ("hypothesis", "parent", "change"):
        value = getattr(experiment, key)
        rows.append((key, value, own if value else DEFAULT))
    rows.append(("host", experiment.host, experiment.origins.get("host", DEFAULT)))
    rows.append(("gpus", gpus, experiment.origins.get("gpus", DEFAULT)))
    rows.append(("expect", list(experiment.expect), own if experiment.expect else DEFAULT))
    values = experiment.config.to_dict()
    for key in keys():
        section, name = key.split(".")
        rows.append((key, values[section][name], experiment.origins.get(key, DEFAULT)))
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """One experiment file as written."""

    path: Path
    where: str
    hypothesis: str
    parent: str | None
    change: str
    host: str | None
    gpus: tuple[int, ...] | int | None
    expect: tuple[str, ...]
    trainer: Mapping[str, object]


def _chain(path: Path) -> list[_File]:
    """The file, its parent, the parent's parent and so on."""
    chain = [_read(path, _missing(path))]
    while parent := chain[-1].parent:
        child = chain[-1].where
        above = path.with_name(f"{parent}.yaml")
        if above in [file.path for file in chain]:
            names = " -> ".join([file.path.stem for file in chain] + [parent])
            raise ConfigurationError(f"{child}: parent must not lead back to itself, got {names}")
        chain.append(_read(above, f"{child}: parent '{parent}': {_missing(above)}"))
    return chain


def _missing(path: Path) -> str:
    tags = sorted(file.stem for file in path.parent.glob("*.yaml"))
    return f"{_where(path)} does not exist; {strict_yaml.did_you_mean(path.stem, tags, otherwise='experiments there are')}"


def _read(path: Path, missing: str) -> _File:
    if not path.exists():
        raise ConfigurationError(missing)
    where = _where(path)
    data = strict_yaml.mapping(where, strict_yaml.load(path, where), _TOP)
    prose = {key: strict_yaml.text(f"{where}: {key}", value) for key, value in data.items() if key in _PROSE}
    return _File(
        path=path,
        where=where,
        hypothesis=prose.get("hypothesis", "").strip(),
        parent=_parent(where, prose.get("parent")),
        change=prose.get("change", "").strip(),
        host=prose.get("host"),
        gpus=_gpus(f"{where}: gpus", data["gpus"]) if "gpus" in data else None,
        expect=_expect(f"{where}: expect", data.get("expect", [])),
        trainer=strict_yaml.mapping(f"{where}: trainer", data.get("trainer")),
    )


def _where(path: Path) -> str:
    return str(Path(path.parent.name) / path.name) if path.parent.name else str(path)


def _parent(where: str, value: str | None) -> str | None:
    try:
        return None if value is None else check_tag(value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: parent: {error}") from None


def _gpus(where: str, value: object) -> tuple[int, ...] | int:
    if isinstance(value, list) and value:
        return strict_yaml.gpu_indices(where, value)
    if isinstance(value, int):
        return strict_yaml.whole(where, value, 1)
    raise ConfigurationError(f"{where} must be a list of GPU indices or a count, got {strict_yaml.shown(value)}")


def _expect(where: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ConfigurationError(f"{where} must be a list of text, got {strict_yaml.shown(value)}")
    return tuple(strict_yaml.text(f"{where}[{i}]", item) for i, item in enumerate(value))


def _parse_override(override: str) -> dict[str, object]:
    """`SECTION.KEY=VALUE` as a `trainer:` mapping of that one key."""
    name, equals, value = override.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot):
        hint = f"; {strict_yaml.did_you_mean(name, keys(), otherwise='keys are')}" if equals else ""
        raise ConfigurationError(f"{SET} must be SECTION.KEY=VALUE, got {strict_yaml.shown(override)}{hint}")
    return {section: {key: strict_yaml.parse_scalar(value, f"{SET} {name}")}}


def _lay(layer: Mapping[str, object], where: str, trainer: dict[str, dict[str, Any]], origins: dict[str, str]) -> None:
    """Merge one layer over `trainer` and note where each key came from."""
    for section, values in strict_yaml.mapping(f"{where}: trainer", layer, _KEYS).items():
        given = strict_yaml.mapping(f"{where}: {section}", values, _KEYS[section])
        trainer.setdefault(section, {}).update(given)
        origins |= {f"{section}.{key}": where for key in given}


def _build(trainer: Mapping[str, Any], origins: Mapping[str, str], own: str, overrides: Sequence[str]) -> TrainConfig:
    try:
        return TrainConfig.from_dict(trainer)
    except ConfigError as error:
        # the sentence begins with the key that is wrong, unless only several keys together are
        key = re.match(r"\w+\.\w+", str(error))
        together = f"{own} with {SET}" if overrides else own
        raise ConfigurationError(f"{origins.get(key[0], together) if key else together}: {error}") from None
