"""`python -m trainer.smoke CONFIG.json`: may a long run of this configuration start? A few real steps on its real devices.

Prints one JSON document: go or no-go with the reasons, the first step against later ones, peak memory, and how far the losses
are from those of an eager loop. Exit code 0 is go, 1 no-go; what the user can mend is a no-go too, with the sentence on stderr
and the code that `python -m trainer` has for it, and so are Ctrl-C, with 130, and SIGTERM, with 143. Nothing is left
behind.
"""

import dataclasses
import gc
import json
import logging
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer import events, pipeline
from trainer.config import TrainConfig
from trainer.errors import ConfigError, TrainerError
from trainer.reference import plain_losses

STEPS = 8
COMPARED_STEPS = 3
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
"""Of a loss, relative. Compiled arithmetic rounds elsewhere than eager arithmetic."""


def smoke(config: TrainConfig, load: Callable[[TrainConfig], pipeline.Loaded] = pipeline.load_all) -> dict[str, Any]:
    """The document. Raises TrainerError for what the user can mend; any other death is a no-go."""
    config = _shortened(config)
    try:
        loaded = load(config)
        told = _train(config, loaded)
        gc.collect()
        if config.uses_cuda:
            torch.cuda.empty_cache()
        return _judge(config, told, plain_losses(config, loaded, COMPARED_STEPS))
    except TrainerError:
        raise
    except Exception as error:  # noqa: BLE001 (what ends a smoke run is its result)
        return _no_go(f"the run died: {type(error).__name__}: {error}")


def _shortened(config: TrainConfig) -> TrainConfig:
    """`STEPS` steps of the same sizes, each with a loss of its own in the events."""
    run = dataclasses.replace(config.run, steps=STEPS, log_every=1, checkpoint_every=STEPS, resume=None)
    warmup = config.optim.lr_warmup_steps
    optim = dataclasses.replace(config.optim, lr_warmup_steps=None if warmup is None else min(warmup, STEPS - 1))
    return dataclasses.replace(config, run=run, optim=optim)


def _train(config: TrainConfig, loaded: pipeline.Loaded) -> list[dict[str, Any]]:
    """The events of the run."""
    with tempfile.TemporaryDirectory() as folder:
        log = events.EventLog(Path(folder) / "events.jsonl")
        try:
            pipeline.train(config, None, log, load=lambda _config: loaded)
        finally:
            log.close()
        return [json.loads(line) for line in (Path(folder) / "events.jsonl").read_text().splitlines()]


def _no_go(reason: str) -> dict[str, Any]:
    return {"schema": 1, "go": False, "reasons": [reason]}


def _judge(config: TrainConfig, told: list[dict[str, Any]], plain: list[float]) -> dict[str, Any]:
    proof = told[-1]
    losses = [event["loss"] for event in told if event["event"] == events.STEP]
    difference = max(
        (abs(a - b) / b for a, b in zip(losses, plain, strict=False) if a is not None and b > 0), default=float("inf")
    )
    allowed = TOLERANCE[config.draft.dtype]
    reasons = []
    if difference > allowed:
        reasons.append(f"losses must be within {allowed:g} of an eager loop's, got {difference:.2g}")
    reasons += [f"{count} {what} after the gate" for what, count in _forbidden(proof) if count]
    stages = {
        name: {key: stage[key] for key in ("device", "compile_s", "capture_s", "first_step_s", "steady_step_s")}
        for name, stage in proof["stages"].items()
    }
    return {
        "schema": 1,
        "go": not reasons,
        "reasons": reasons,
        "gate_open_s": next(event["elapsed_s"] for event in told if event["event"] == events.GATE_OPEN),
        "stages": stages,
        "gpus": {device: {"peak_gib": gpu["peak_gib"]} for device, gpu in proof["gpus"].items()},
        "context_tokens_per_s": proof["context_tokens_per_s"],
        "losses": losses[:COMPARED_STEPS],
        "eager_losses": plain,
        "loss_difference": difference,
    }


def _forbidden(proof: dict[str, Any]) -> list[tuple[str, int]]:
    gpus = proof["gpus"].values()
    return [
        ("captures", proof["captures_after_gate"]),
        ("recompiles", proof["recompiles"]),
        ("device allocations", sum(gpu["device_allocs_after_gate"] for gpu in gpus)),
        ("retried allocations", sum(gpu["alloc_retries_after_gate"] for gpu in gpus)),
        ("moved buffers", sum(stage["addresses_unchanged"] is False for stage in proof["stages"].values())),
    ]


def main(argv: Sequence[str]) -> int:
    """Judge the configuration in a file; returns the exit code."""
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        asked = len(argv) == 1
        (sys.stdout if asked else sys.stderr).write("usage: python -m trainer.smoke CONFIG.json\n")
        return 0 if asked else 2
    logging.getLogger("trainer").addHandler(logging.NullHandler())  # else Python shows errors that are told below
    try:
        verdict, code = smoke(_read(Path(argv[0]))), 1
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        verdict, code = _no_go(str(error)), error.exit_code
    except (KeyboardInterrupt, SystemExit) as asked:  # the latter is SIGTERM's handler's, with its code
        sys.stderr.write("stopped\n")
        verdict, code = _no_go("stopped"), getattr(asked, "code", 130)
    sys.stdout.write(json.dumps(verdict) + "\n")
    return 0 if verdict["go"] else code


def _read(path: Path) -> TrainConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be used: {error}") from None
    return TrainConfig.from_json(path, text)


if __name__ == "__main__":
    from trainer.__main__ import leave

    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # an exit cleans up, a death does not
    leave(main(sys.argv[1:]))
