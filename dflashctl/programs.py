"""What a run can run: the trainer, or what prepares for it and measures what it has made; and what such a program answers.

A module of its own because `dflashctl.launch` starts them all alike.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dflashctl.errors import ConfigurationError, EnvironmentFault
from dflashctl.experiment import SET, Experiment
from dflashctl.runs import RunRecord
from dflashctl.session import HostSession
from trainer.config import TrainConfig
from trainer.errors import ConfigError

LOG_LINES = 20
"""Of a log, where its end is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What a run runs: a module of its release."""

    module: str = "trainer"
    suffix: str = ""
    """What its tag has behind the experiment's."""
    arguments: tuple[str, ...] | None = None
    """None: the run's config.json."""
    num_gpus: int | None = None
    """None: as many as the experiment's devices need."""
    answers: bool = False
    """Its answer is the last line of its log, which `result` reads once it has ended, however it has."""


TRAINER: Final = Program()
SMOKE: Final = Program(module="trainer.smoke", suffix="-smoke", answers=True)
PREPARE: Final = Program(module="trainer.prepare", suffix="-prepare")


def preparation(session: HostSession, experiment: Experiment) -> tuple[Experiment, Program]:
    """What makes the data of an experiment, on one GPU at most; raises ConfigurationError where it would surely not."""
    config = experiment.config
    try:
        config.prepare.check()
    except ConfigError as error:
        raise ConfigurationError(f"{experiment.tag}: {error}") from None
    request = {
        "root": session.host.root,
        "host": session.host.name,
        "output": config.data.path,
        "inputs": config.prepare.input,
    }
    session.call("runs", "check_preparation", request)
    gpus = experiment.gpus[:1] if isinstance(experiment.gpus, tuple) else None
    num_gpus = 0 if config.prepare_device == "cpu" else 1
    return replace(experiment, gpus=gpus), replace(PREPARE, num_gpus=num_gpus)


def result(session: HostSession, record: RunRecord, key: str) -> dict[str, Any]:
    """The document with `key` that an ended run has left in the last line of its log; raises EnvironmentFault without one."""
    request = {"root": session.host.root, "run": record.run, "launch_id": record.launch_id, "lines": LOG_LINES}
    answer = session.call("logs", "last_document", request)
    found = answer["document"]
    if not isinstance(found, dict) or key not in found:
        text = "\n".join(answer["lines"]) or "(the log is empty)"
        raise EnvironmentFault(f"{record.name} ended without a result; its log ends:\n{text}", details={"run": record.run})
    return found


def overrides(session: HostSession, record: RunRecord) -> list[str]:
    """What `--set` gave a run, as SECTION.KEY=VALUE: who resumes it means the same, but for where it goes on from.

    Raises EnvironmentFault.
    """
    request = {"root": session.host.root, "run": record.run, "launch_id": record.launch_id}
    found = session.call("runs", "settings", request)
    try:
        given = [key.split(".") for key, origin in found["origins"].items() if origin == SET and key != "run.resume"]
        return [f"{section}.{key}={json.dumps(found['config'][section][key])}" for section, key in given]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise EnvironmentFault(f"{record.name}: its run.json and config.json are not those of one run") from None


def evaluation(session: HostSession, record: RunRecord, prompts: str | None, more: Sequence[str]) -> tuple[Experiment, Program]:
    """What measures the newest checkpoint of a run, on `prompts` (default: what its data hold out); raises EnvironmentFault."""
    request = {"root": session.host.root, "run": record.run, "launch_id": record.launch_id}
    found = session.call("runs", "trained", request)
    try:
        config = TrainConfig.from_dict(found["config"])
    except ConfigError as error:
        raise EnvironmentFault(f"{record.name}: its config.json is not one of this version: {error}") from error
    gguf = ["--gguf-file", config.target.gguf_file] if config.target.gguf_file else []
    device = "cuda:0" if config.uses_cuda else "cpu"
    where = ["--root", session.host.root, "--checkpoint", found["checkpoint"], "--target", config.target.path, *gguf]
    how = ["--dtype", config.target.dtype, "--prompts", prompts or config.data.path, "--device", device, "--output", "."]
    experiment = Experiment(
        tag=record.tag,
        path=Path(),
        hypothesis=f"What the drafter of {record.run} is worth.",
        parent=record.run,
        change="",
        host=record.host,
        gpus=None,
        expect=(),
        trainer={},
        origins={},
        config=config,
    )
    arguments = (*where, *how, *more)
    num_gpus = 1 if config.uses_cuda else 0
    return experiment, Program(module="trainer.evaluate", suffix="-eval", arguments=arguments, num_gpus=num_gpus, answers=True)
