"""Runs of the pipeline on a tiny random target, compared with a plain loop or broken on purpose."""

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import events, pipeline
from trainer.config import TrainConfig
from trainer.synthetic import loader

LOAD = loader("tiny", (40, 250), num_documents=64)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings are no errors here: torch's compiler provokes some that it then hides, and an error cannot be hidden."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def _no_gpu_memory_is_carried_over() -> Any:
    yield
    gc.collect()  # graphs and the drafters that hold them are cycles
    torch.cuda.empty_cache()


@pytest.fixture
def config() -> Callable[..., TrainConfig]:
    return make_config


def make_config(targets: str = "0", drafters: str = "0", **sections: dict[str, object]) -> TrainConfig:
    """A tiny run on logical GPUs: `drafters="01"` is one drafter on each of the first two."""
    base: dict[str, dict[str, object]] = {
        "target": {"path": "tiny", "dtype": "float32"},
        "draft": {"num_layers": 2, "block_size": 8, "num_anchors": 32, "target_layer_ids": [1, 3], "dtype": "float32"},
        "data": {"path": "random"},
        "batch": {"rows": 2, "row_tokens": 256},
        "optim": {"lr": 1e-3, "lr_warmup_steps": 2},
        "pipeline": {"target_devices": [f"cuda:{i}" for i in targets], "drafter_devices": [f"cuda:{i}" for i in drafters]},
        "run": {"steps": 24, "log_every": 1, "checkpoint_every": 1000},
    }
    return TrainConfig.from_dict({name: values | sections.get(name, {}) for name, values in base.items()})


@pytest.fixture
def load() -> Callable[[TrainConfig], pipeline.Loaded]:
    return LOAD


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run it, in a folder of that name below `tmp_path`, and return its events."""

    def go(config: TrainConfig, name: str = ".") -> list[dict[str, Any]]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        log = events.EventLog(folder / "events.jsonl")
        began = time.monotonic()
        try:
            pipeline.train(config, folder, log, load=LOAD)
        finally:
            log.close()
        told = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert time.monotonic() - began < 300
        return told

    return go
