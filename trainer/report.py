"""How a run tells what it does: the one place that writes events.jsonl and the log's lines for people.

Only the supervisor's thread calls it, but for `opening`. Rates and wait fractions are of the time since the last line.
"""

import hashlib
import json
import logging
import platform
import time
from dataclasses import dataclass

import torch
import transformers

from trainer import events
from trainer.config import TrainConfig
from trainer.dataset import Shards
from trainer.events import EventLog
from trainer.metrics import Totals
from trainer.model.draft import DraftModel, DraftSpec, TargetInfo
from trainer.proof import Proof, Waits, waits
from trainer.wiring import Saved, StepReport, Validated, Wiring

log = logging.getLogger("trainer")
_SHOWN_POSITIONS = 3
OVERDUE_S = 60.0
OVERDUE_STEPS = 20
"""Nothing has moved for as long as this many steps used to take, and for a minute at least: something is wrong."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """How much has been done since the gate opened; not by the run that this one goes on from."""

    steps: int = 0
    context_tokens: int = 0
    draft_tokens: float = 0.0


class Reporter:
    """Folds what the workers say into events and lines."""

    def __init__(self, config: TrainConfig, event_log: EventLog) -> None:
        """Nothing is written yet."""
        self._config = config
        self._events = event_log
        self._begin = time.monotonic()
        self._wiring: Wiring | None = None
        self._opened: float | None = None
        self._since = self._begin
        self._waits = Waits({}, 0.0, 0.0)
        self._proof: Proof | None = None
        self._marked = _Counts()
        self._lines = 0
        self._open_step: list[StepReport] = []
        self._loaded: dict[str, object] = {}
        self._counts = _Counts()
        self._loss: float | None = None

    def started(self) -> None:
        """The configuration is good; loading begins."""
        config = self._config.to_dict()
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        devices = {d: _device_name(d) for d in self._config.pipeline.target_devices + self._config.pipeline.drafter_devices}
        self._events.write(events.STARTED, versions=versions, devices=devices, config_digest=digest[:16], config=config)
        log.info("loading the target model %s and the data %s", self._config.target.path, self._config.data.path)

    def loaded(self, spec: DraftSpec, shards: Shards, waste: float) -> None:
        """Target and data are in memory; `waste` is the share of an epoch that is padding."""
        with torch.device("meta"):
            num_parameters = sum(p.numel() for p in DraftModel(spec).parameters())
        self._loaded = {
            "draft_parameters": num_parameters,
            "target_layer_ids": list(spec.target_layer_ids),
            "mask_token_id": spec.mask_token_id,
            "documents": len(shards),
            "document_tokens": len(shards.tokens),
            "packing_waste": waste,
        }
        log.info(
            "drafter: %d layers, %.1f M parameters, blocks of %d, tapped target layers %s, mask token %d",
            spec.num_layers,
            num_parameters / 1e6,
            spec.block_size,
            list(spec.target_layer_ids),
            spec.mask_token_id,
        )
        log.info("data: %d documents, %d tokens, %.1f %% of an epoch is padding", len(shards), len(shards.tokens), 100 * waste)

    def opening(self, wiring: Wiring, spec: DraftSpec, info: TargetInfo) -> None:
        """Every worker is ready and none has gone on; what counts from the gate counts from now. Any thread may call it."""
        self._wiring, self._since, self._waits = wiring, time.monotonic(), waits(wiring)
        self._opened = self._since
        self._proof = Proof(self._config, wiring, spec, info)

    def gate_open(self) -> None:
        """The gate is open."""
        self._events.write(events.GATE_OPEN, **self._loaded)
        pipeline = self._config.pipeline
        log.info(
            "gate open after %.1f s: targets on %s, drafters on %s",
            self._since - self._begin,
            ", ".join(pipeline.target_devices),
            ", ".join(pipeline.drafter_devices),
        )

    def heartbeat(self, step: int | None, idle_s: float) -> None:
        """The run is alive; `idle_s` seconds ago a worker moved last, which is overdue when steps used to take far less."""
        done = self._counts.steps
        typical = (self._since - self._opened) / done if self._opened and done else None
        overdue = typical is not None and idle_s > max(OVERDUE_S, OVERDUE_STEPS * typical)
        self._events.write(events.HEARTBEAT, step=step, idle_s=round(idle_s, 3), overdue=overdue)

    def step_report(self, report: StepReport) -> None:
        """One drafter's share of a line; the last drafter's completes it."""
        self._open_step.append(report)
        if len(self._open_step) == len(self._config.pipeline.drafter_devices):
            reports, self._open_step = self._open_step, []
            self._step(reports)

    def _step(self, reports: list[StepReport]) -> None:
        totals = reports[0].totals
        for other in reports[1:]:
            totals += other.totals
        context_tokens = sum(report.context_tokens for report in reports)
        seconds = time.monotonic() - self._since
        self._loss = totals.loss
        assert self._wiring is not None
        step, before = reports[0].step, self._counts
        self._counts = _Counts(
            step - self._wiring.first_step, before.context_tokens + context_tokens, before.draft_tokens + totals.draft_tokens
        )
        rate = context_tokens / seconds
        self._events.write(
            events.STEP,
            step=step,
            loss=totals.loss,
            accuracy=totals.accuracy,
            acceptance_length=totals.acceptance_length,
            lr=reports[0].lr,
            grad_norm=reports[0].grad_norm,
            context_tokens_per_s=rate,
            draft_tokens_per_s=totals.draft_tokens / seconds,
            **self._flow(),
        )
        log.info(step_line(step, self._config.run.steps, totals, reports[0].lr, rate))
        self._since += seconds
        self._lines += 1
        if self._lines == 1:
            self._mark()
        elif self._lines == 2:
            self._events.write(events.STEADY, **self._read_proof())

    def _mark(self) -> None:
        """The first line is over, and with it what happens once; rates of the proof count from here."""
        assert self._proof is not None
        self._marked = self._counts
        self._proof.mark()

    def _read_proof(self) -> dict[str, object]:
        assert self._proof is not None
        now, then = self._counts, self._marked
        return self._proof.read(
            steps=now.steps - then.steps,
            context_tokens=now.context_tokens - then.context_tokens,
            draft_tokens=now.draft_tokens - then.draft_tokens,
        )

    def _flow(self) -> dict[str, object]:
        """Channel depths now, and which share of the time each worker waited for input, for room, or for other drafters."""
        assert self._wiring is not None
        before, self._waits = self._waits, waits(self._wiring)
        fractions = {
            worker: {end: round(share, 3) for end, share in ends.items()}
            for worker, ends in self._waits.shares_since(before).items()
        }
        depths = {channel.name: channel.statistics().depth for channel in self._wiring.channels}
        return {"channel_depths": depths, "wait_fractions": fractions}

    def validated(self, validated: Validated) -> None:
        """The held-out split was looked at."""
        totals = validated.totals
        self._events.write(
            events.VALIDATION,
            step=validated.step,
            loss=totals.loss,
            accuracy=totals.accuracy,
            acceptance_length=totals.acceptance_length,
            blocks=totals.num_blocks,
        )
        loss, length = _shown(totals.loss, ".3f"), _shown(totals.acceptance_length, ".2f")
        log.info("held out after step %d: loss %s, accept %s", validated.step, loss, length)

    def saved(self, saved: Saved) -> None:
        """A checkpoint lies on disk."""
        self._events.write(events.CHECKPOINT, step=saved.step, path=str(saved.path))
        log.info("checkpoint %s", saved.path)

    def finished(self) -> None:
        """All steps are done."""
        seconds = time.monotonic() - self._begin
        self._events.write(
            events.FINISHED,
            step=self._config.run.steps,
            steps=self._counts.steps,
            loss=self._loss,
            seconds=round(seconds, 3),
            context_tokens=self._counts.context_tokens,
            draft_tokens=self._counts.draft_tokens,
            **self._read_proof(),
        )
        log.info("finished %d steps, %d context tokens in %.1f s", self._counts.steps, self._counts.context_tokens, seconds)

    def close(self) -> None:
        """Nothing more will be asked."""
        if self._proof is not None:
            self._proof.close()

    def failed(self, error: str, worker: str | None, step: int | None) -> None:
        """The run has ended before its last step."""
        self._events.write(events.FAILED, error=error, worker=worker, step=step)
        where = f" in {worker}" if worker else ""
        log.error("failed%s%s: %s", where, f", step {step}" if step else "", error)


def step_line(step: int, steps: int, totals: Totals, lr: float, context_tokens_per_s: float) -> str:
    """A line for people; a value that is not known is a dash."""
    accuracy = " ".join(_shown(value, ".3f") for value in totals.accuracy[:_SHOWN_POSITIONS])
    return (
        f"step {step}/{steps}  loss {_shown(totals.loss, '.3f')}  acc {accuracy}  "
        f"accept {_shown(totals.acceptance_length, '.2f')}  lr {lr:.1e}  {context_tokens_per_s:.0f} ctx tok/s"
    )


def _shown(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _device_name(device: str) -> str | None:
    """None for a GPU that is not there: the run is refused right after it has told what it was asked."""
    if device == "cpu":
        return platform.processor() or platform.machine()
    return torch.cuda.get_device_name(device) if int(device.removeprefix("cuda:")) < torch.cuda.device_count() else None
