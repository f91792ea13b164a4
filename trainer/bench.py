"""`python -m trainer.bench ceiling|run`: what this machine can do, and what the pipeline makes of it.

    ceiling [--root DIR]     bf16 matrix product, copy on a GPU, copy between two; kept in DIR/ceiling.json for every run
    run [options]            the pipeline on a target of known shape with random weights and full rows; one JSON document

`run` measures each choice in a process of its own: call it once for each line of a table.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer import events, pipeline
from trainer.config import TrainConfig
from trainer.errors import ConfigError, TrainerError
from trainer.proof import CEILING_FILE, GIB
from trainer.synthetic import SHAPES, loader

_REPEATS = 10
_SIDE = 8192


def main(argv: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        measured = ceiling(Path(arguments.root)) if arguments.what == "ceiling" else run(arguments)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(measured) + "\n")
    return 0


def ceiling(root: Path) -> dict[str, float | None]:
    """Medians of ten, on random data; raises ConfigError where there is nothing to measure or no place to keep it."""
    if not torch.cuda.is_available():
        raise ConfigError("ceiling: needs a GPU, and torch sees none here")
    if not root.is_dir():
        raise ConfigError(f"--root must be a folder, got {root}")
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda:0", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(GIB // 2, device="cuda:0")
    here = torch.empty_like(source)
    measured: dict[str, float | None] = {
        "matmul_tflops": 2 * _SIDE**3 / _median_s(lambda: torch.mm(a, b)) / 1e12,
        "copy_gb_per_s": 2 * source.nbytes / _median_s(lambda: here.copy_(source)) / 1e9,
        "peer_copy_gb_per_s": None,
    }
    if torch.cuda.device_count() > 1:
        there = torch.empty_like(source, device="cuda:1")
        measured["peer_copy_gb_per_s"] = source.nbytes / _median_s(lambda: there.copy_(source)) / 1e9
    (root / CEILING_FILE).write_text(json.dumps(measured) + "\n", encoding="utf-8")
    return measured


def _median_s(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    seconds = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return sorted(seconds)[_REPEATS // 2]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train for `--steps` steps; rates are of the last ones, from the first log line on. Raises TrainerError."""
    log_every = arguments.log_every or max(1, arguments.steps // 4)
    config = TrainConfig.from_dict(
        {
            "target": {"path": arguments.shape, "dtype": arguments.dtype},
            "draft": {
                "num_layers": arguments.layers,
                "num_anchors": arguments.anchors,
                "block_size": arguments.block_size,
                "dtype": arguments.dtype,
            },
            "data": {"path": "random"},
            "batch": {"rows": arguments.rows, "row_tokens": arguments.row_tokens},
            "pipeline": {
                "target_devices": arguments.targets.split(","),
                "drafter_devices": arguments.drafters.split(","),
                "graphs": arguments.graphs,
                "allow_unsound": True,
            },
            "run": {
                "steps": arguments.steps,
                "log_every": log_every,
                "checkpoint_every": arguments.steps,
                "root": arguments.root,
            },
        }
    )
    if arguments.steps <= log_every:
        raise ConfigError(
            f"--steps must be more than --log-every ({log_every}), got {arguments.steps}: "
            "rates are of what follows the first log line"
        )
    with tempfile.TemporaryDirectory() as folder:
        log = events.EventLog(Path(folder) / "events.jsonl")
        load = loader(arguments.shape, (arguments.row_tokens, arguments.row_tokens))
        pipeline.train(config, None, log, load=load)
        log.close()
        told = [json.loads(line) for line in (Path(folder) / "events.jsonl").read_text().splitlines()]
    gate_open = next(event["elapsed_s"] for event in told if event["event"] == events.GATE_OPEN)
    losses = [event["loss"] for event in told if event["event"] == events.STEP]
    # `steady` ends with the second line, `finished` with the last
    return {
        "gate_open_s": gate_open,
        "losses": losses,
        "steady": next(e for e in told if e["event"] == events.STEADY),
        "finished": told[-1],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.bench", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("ceiling", "run"):
        commands.add_parser(name).add_argument("--root", default=".", help="folder of ceiling.json")
    options = commands.choices["run"]
    options.add_argument("--shape", choices=SHAPES, default="small")
    options.add_argument("--rows", type=int, default=1)
    options.add_argument("--row-tokens", type=int, default=4096)
    options.add_argument("--anchors", type=int, default=64, help="blocks a row")
    options.add_argument("--block-size", type=int, default=16)
    options.add_argument("--layers", type=int, default=5, help="layers of the drafter")
    options.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options.add_argument("--targets", default="cuda:0", help="devices of the target loops, with commas")
    options.add_argument("--drafters", default="cuda:0", help="devices of the drafters, with commas")
    options.add_argument("--graphs", choices=["none", "lazy", "mainwarm", "threadwarm"], default="threadwarm")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--log-every", type=int, help="steps between two log lines, a quarter of --steps by default")
    return parser


if __name__ == "__main__":
    from trainer.__main__ import leave

    leave(main(sys.argv[1:]))
