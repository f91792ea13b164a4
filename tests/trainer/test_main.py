import dataclasses
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import trainer.__main__
import trainer.drafter
import trainer.events
import trainer.pipeline
from trainer.config import TrainConfig
from trainer.errors import TrainerError

ENDS_WITHIN_S = 300
"""Far more than it takes; importing torch on a busy machine is most of it."""

GPUS = {"target_devices": ["cuda:1000"], "drafter_devices": ["cuda:0"]}

HANGING_TARGET = """
import itertools, sys, threading
import trainer.__main__, trainer.pipeline
from trainer.model.target import TargetModel

hangs = threading.Event()
batches, context_features, calls = trainer.pipeline.batches, TargetModel.context_features, itertools.count()

def hang_after_the_dry_run(*args):
    if next(calls):
        hangs.set()
        threading.Event().wait()
    return context_features(*args)

def die_while_the_target_hangs(*args):
    yield from itertools.islice(batches(*args), 1)
    hangs.wait(30)
    raise RuntimeError("no more batches")

trainer.pipeline.JOIN_S = 0.2
trainer.pipeline.batches = die_while_the_target_hangs
TargetModel.context_features = hang_after_the_dry_run
trainer.__main__.leave(trainer.__main__.main(sys.argv[1:]))
"""


@pytest.fixture
def _handlers_restored() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def write_config(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def events_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    told = [trainer.events.parse_line(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in told if event is not None]  # the last may be half written


class Process:
    """`python ARGUMENTS` with its output in files, so that it never waits for a reader; killed if a test leaves it."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self._out, self._err = folder / "stdout", folder / "stderr"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self._out.open("w") as out, self._err.open("w") as err:
            self.popen = subprocess.Popen([sys.executable, *arguments], stdout=out, stderr=err, env=environment)

    def wait(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        return self.popen.wait(ENDS_WITHIN_S), self._out.read_text(), self._err.read_text()


def killed(*_: Any) -> None:
    raise TrainerError("killed")


Start = Callable[[list[str]], Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Process] = []

    def start(arguments: list[str]) -> Process:
        started.append(Process(tmp_path, arguments))
        return started[-1]

    yield start
    for process in started:
        process.popen.kill()
        process.popen.wait(ENDS_WITHIN_S)


def until_step(folder: Path, step: int) -> None:
    deadline, pause = time.monotonic() + ENDS_WITHIN_S, threading.Event()
    while not any(event.get("step", 0) >= step for event in events_of(folder)[:-1]):
        assert time.monotonic() < deadline, events_of(folder)
        pause.wait(0.02)


def test_a_run_ends_with_0_and_leaves_events_and_checkpoints_beside_its_configuration(
    tiny_run: Any, tmp_path: Path, start: Start
) -> None:
    process = start(["-m", "trainer", str(write_config(tmp_path, tiny_run.config(run={"log_every": 3})))])
    code, out, err = process.wait()
    assert (code, err) == (0, "")
    assert [line.split("  ")[0] for line in out.splitlines() if line.startswith("step")] == ["step 3/6", "step 6/6"]
    assert events_of(tmp_path)[-1]["event"] == "finished"
    assert (tmp_path / "checkpoints" / "latest" / "model.safetensors").is_file()


@pytest.mark.usefixtures("_handlers_restored")
def test_a_run_started_again_does_the_same_again_and_loses_nothing(tiny_run: Any, tmp_path: Path) -> None:
    path = str(write_config(tmp_path, tiny_run.config()))
    (tmp_path / "events.1.jsonl").write_text("from long ago")
    for _ in range(3):
        assert trainer.__main__.main([path]) == 0
    names = [
        "events.1.jsonl",
        "checkpoints.2",
        "events.2.jsonl",
        "checkpoints.3",
        "events.3.jsonl",
        "checkpoints",
        "events.jsonl",
    ]
    assert sorted(found.name for found in tmp_path.iterdir()) == sorted([*names, "config.json"])
    assert (tmp_path / "events.1.jsonl").read_text() == "from long ago"
    for name in ("events.2.jsonl", "events.3.jsonl", "events.jsonl"):
        events = [json.loads(line)["event"] for line in (tmp_path / name).read_text().splitlines()]
        assert (events[0], events.count("started"), events[-1]) == ("started", 1, "finished")
    for name in ("checkpoints.2", "checkpoints.3", "checkpoints"):
        assert (tmp_path / name / "latest" / "model.safetensors").is_file()


@pytest.mark.usefixtures("_handlers_restored")
@pytest.mark.parametrize("written", ["absolute", "below the root"])
def test_a_run_started_again_goes_on_from_its_own_earlier_checkpoint(tiny_run: Any, written: str) -> None:
    folder = tiny_run.root / written
    folder.mkdir()
    checkpoint = folder / "checkpoints" / "latest"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.drafter.Drafter, "check_equal", stop_in_call(4, trainer.drafter.Drafter.check_equal, killed))
        assert trainer.__main__.main([str(write_config(folder, tiny_run.config(run={"checkpoint_every": 2})))]) == 1
    (folder / "checkpoints" / ".step-6.partial").mkdir()
    resume = str(checkpoint if written == "absolute" else checkpoint.relative_to(tiny_run.root))
    path = write_config(folder, tiny_run.config(run={"checkpoint_every": 2, "resume": resume}))
    assert trainer.__main__.main([str(path)]) == 0
    steps = [event["step"] for event in events_of(folder) if event["event"] == "step"]
    assert steps == [5, 6]
    assert sorted(found.name for found in (folder / "checkpoints.1").iterdir()) == ["latest", "step-2", "step-4"]


@pytest.mark.usefixtures("_handlers_restored")
def test_of_starts_that_had_a_checkpoint_the_last_one_counts(
    tiny_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("checkpoints.2/step-4", "checkpoints.9/step-4", "checkpoints.10/step-4", "checkpoints.11/step-2"):
        (tmp_path / place).mkdir(parents=True)
    path = write_config(tmp_path, tiny_run.config(run={"resume": str(tmp_path / "checkpoints" / "step-4")}))
    assert trainer.__main__.main([str(path)]) == 1
    assert f"run.resume {tmp_path / 'checkpoints.10' / 'step-4'}: nothing to resume from" in capsys.readouterr().err


@pytest.mark.usefixtures("_handlers_restored")
def test_starts_that_die_before_they_save_do_not_lose_what_an_earlier_one_saved(tiny_run: Any, tmp_path: Path) -> None:
    def dies_in_save(number: int, run: dict[str, object]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            save = stop_in_call(number, trainer.drafter.Drafter.save, killed)
            patch.setattr(trainer.drafter.Drafter, "save", save)
            assert trainer.__main__.main([str(write_config(tmp_path, tiny_run.config(run=run)))]) == 1

    resumed: dict[str, object] = {"checkpoint_every": 2, "resume": str(tmp_path / "checkpoints" / "latest")}
    dies_in_save(3, {"checkpoint_every": 2})
    for _ in range(2):
        assert trainer.__main__.main([str(write_config(tmp_path, "{"))]) == 3
        assert (tmp_path / "checkpoints" / "latest").exists(), "a typo moves no checkpoint"
    dies_in_save(1, resumed)
    (tmp_path / "checkpoints" / ".step-6.partial").mkdir(parents=True)
    for _ in range(2):
        dies_in_save(1, resumed)
    assert trainer.__main__.main([str(write_config(tmp_path, tiny_run.config(run=resumed)))]) == 0
    assert [event["step"] for event in events_of(tmp_path) if event["event"] == "step"] == [5, 6]


@pytest.mark.usefixtures("_handlers_restored")
def test_a_training_state_without_its_tensors_is_one_sentence(
    tiny_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "checkpoints" / "step-4" / "training"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.drafter.Drafter, "check_equal", stop_in_call(4, trainer.drafter.Drafter.check_equal, killed))
        assert trainer.__main__.main([str(write_config(tmp_path, tiny_run.config(run={"checkpoint_every": 2})))]) == 1
    save_file({}, state / "state.safetensors")
    told = json.loads((state / "state.json").read_text())
    (state / "state.json").write_text(json.dumps({key: told[key] for key in ("step", "trained_with")}))
    capsys.readouterr()
    path = write_config(tmp_path, tiny_run.config(run={"resume": str(state.parent)}))
    assert trainer.__main__.main([str(path)]) == 1
    err = capsys.readouterr().err
    assert re.fullmatch(r"error: run\.resume: \S+ in the training state must be float32 \[.*\], got nothing\n", err)
    assert events_of(tmp_path)[-1]["event"] == "failed"


def test_two_runs_do_not_work_in_one_folder(tiny_run: Any, tmp_path: Path, start: Start) -> None:
    path = write_config(tmp_path, tiny_run.config(run={"steps": 1_000_000, "checkpoint_every": 1_000_000}))
    process = start(["-m", "trainer", str(path)])
    until_step(tmp_path, 1)
    before = sorted(found.name for found in tmp_path.iterdir())
    again = functools.partial(subprocess.run, [sys.executable, "-m", "trainer", str(path)], capture_output=True, text=True)
    second = again(timeout=ENDS_WITHIN_S, check=False)  # it would train for ever if it were not refused
    assert (second.returncode, second.stderr) == (3, f"error: {tmp_path}: another run works in this folder\n")
    assert sorted(found.name for found in tmp_path.iterdir()) == before
    process.popen.kill()
    process.popen.wait(ENDS_WITHIN_S)
    write_config(tmp_path, tiny_run.config())
    assert again(timeout=ENDS_WITHIN_S, check=False).returncode == 0


def stop_in_call(number: int, original: Any, stop: Any) -> Any:
    calls = itertools.count(1)
    return lambda *args: (stop if next(calls) == number else original)(*args)


def test_sighup_is_ignored_and_sigterm_ends_a_run_with_143(tiny_run: Any, tmp_path: Path, start: Start) -> None:
    process = start(["-m", "trainer", str(write_config(tmp_path, tiny_run.config(run={"steps": 1_000_000})))])
    until_step(tmp_path, 1)
    process.popen.send_signal(signal.SIGHUP)
    until_step(tmp_path, [event["step"] for event in events_of(tmp_path) if event["event"] == "step"][-1] + 10)
    process.popen.send_signal(signal.SIGTERM)
    code, out, err = process.wait()
    assert (code, err) == (143, "error: stopped by SIGTERM\n")
    assert "stopped by SIGTERM" in out.splitlines()[-1]
    last = events_of(tmp_path)[-1]
    assert (last["event"], last["error"], last["worker"]) == ("failed", "stopped by SIGTERM", None)


def test_a_run_that_was_killed_is_resumed_bit_for_bit(tiny_run: Any, start: Start, tmp_path: Path) -> None:
    def config(name: str, **run: object) -> Path:
        (tmp_path / name).mkdir()
        return write_config(tmp_path / name, tiny_run.config(run={"steps": 150, "checkpoint_every": 3} | run))

    killed = config("killed")
    process = start(["-m", "trainer", str(killed)])
    until_step(killed.parent, 12)
    process.popen.kill()
    process.popen.wait(ENDS_WITHIN_S)
    latest = (killed.parent / "checkpoints" / "latest").resolve()
    done = int(latest.name.removeprefix("step-"))
    assert 9 <= done < 150
    seen = {}
    for path in (config("straight", checkpoint_every=150), config("resumed", checkpoint_every=150, resume=str(latest))):
        log = trainer.events.EventLog(path.parent / "events.jsonl")
        trainer.pipeline.train(TrainConfig.from_dict(json.loads(path.read_text())), path.parent, log)
        log.close()
        steps = [event for event in events_of(path.parent) if event["event"] == "step"]
        seen[path.parent.name] = {event["step"]: (event["loss"], event["grad_norm"]) for event in steps}
    assert seen["resumed"] == {step: told for step, told in seen["straight"].items() if step > done}
    assert len(seen["resumed"]) == 150 - done
    files = [tmp_path / name / "checkpoints" / "latest" / "model.safetensors" for name in seen]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_worker_that_cannot_be_joined_does_not_keep_the_process(tiny_run: Any, tmp_path: Path, start: Start) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(HANGING_TARGET)
    process = start([str(driver), str(write_config(tmp_path, tiny_run.config()))])
    code, _, err = process.wait()
    assert code == 1
    assert "Traceback" in err
    assert err.endswith("RuntimeError: no more batches\n")
    last = events_of(tmp_path)[-1]
    assert (last["event"], last["worker"]) == ("failed", "prefetch-0")


def bad_inputs(tiny_run: Any, name: str) -> tuple[object, str]:
    """A configuration that is refused, and what the sentence says."""
    return {
        "json": ("{", "config.json is not JSON"),
        "nested": ("[" * 100_000, "config.json is nested too deeply"),
        "number": (tiny_run.config(optim={"lr": 10**400}), "optim.lr must be a number, got 1000"),
        "no path": (tiny_run.config(run={"root": "\0"}), "run.root must be text of characters that a path can have"),
        "long path": (tiny_run.config(run={"resume": "a/" * 2500}), "run.resume must be at most 1024 characters, got 5000"),
        "unknown key": (tiny_run.config(run={"step": 3}), "run: unknown key 'step'; did you mean 'steps'?"),
        "graphs": (tiny_run.config(pipeline={"graphs": "threadwarm"}), "pipeline.graphs must be none on cpu, got threadwarm"),
        "gpus": (
            tiny_run.config(pipeline=GPUS),
            "pipeline: target_devices and drafter_devices need 1001 GPUs, for they name cuda:1000; torch sees 0 here",
        ),
        "no data": (tiny_run.config(data={"path": "nowhere"}), "nowhere: no token shards here"),
        "long document": (tiny_run.config(batch={"row_tokens": 12}), "tokens, batch.row_tokens allows 12"),
        "no target": (tiny_run.config(target={"path": "nowhere"}), "target.path must be a folder or a hub id"),
        "layers": (tiny_run.config(draft={"target_layer_ids": [9]}), "draft.target_layer_ids must be different layers in 0..2"),
        "mask token": (tiny_run.config(draft={"mask_token_id": 30}), "token id 30, which is the mask token"),
        "vocabulary": (tiny_run.config(draft={"mask_token_id": 64}), "draft.mask_token_id must be below the 64 embedding rows"),
    }[name]


@pytest.mark.usefixtures("_handlers_restored")
@pytest.mark.parametrize(
    "name",
    [
        "json",
        "nested",
        "number",
        "no path",
        "long path",
        "unknown key",
        "graphs",
        "gpus",
        "no data",
        "long document",
        "no target",
        "layers",
        "mask token",
        "vocabulary",
    ],
)
def test_bad_input_is_one_sentence_and_3(tiny_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    config, text = bad_inputs(tiny_run, name)
    assert trainer.__main__.main([str(write_config(tmp_path, config))]) == 3
    err = capsys.readouterr().err
    assert text in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    last = events_of(tmp_path)[-1]
    assert last["event"] == "failed"
    assert f"error: {last['error']}\n" == err


@pytest.mark.usefixtures("_handlers_restored")
def test_a_full_disk_does_not_hide_the_first_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> bool:
        raise TrainerError("events.jsonl cannot be written")

    monkeypatch.setattr(trainer.events.EventLog, "write", full)
    assert trainer.__main__.main([str(write_config(tmp_path, "{"))]) == 3
    assert "config.json is not JSON" in capsys.readouterr().err


@pytest.mark.usefixtures("_handlers_restored")
def test_empty_data_is_one_sentence_and_3(tiny_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run.write_shards("empty", [])
    assert trainer.__main__.main([str(write_config(tmp_path, tiny_run.config(data={"path": "empty"})))]) == 3
    assert "the data set is empty" in capsys.readouterr().err


@pytest.mark.usefixtures("_handlers_restored")
def test_data_of_another_tokenizer_is_one_sentence_and_3(
    tiny_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataclasses.replace(tiny_run, tokenizer_digest="another").write_shards("foreign", [list(range(5, 15))])
    assert trainer.__main__.main([str(write_config(tmp_path, tiny_run.config(data={"path": "foreign"})))]) == 3
    assert "was made with another vocabulary or chat template than the target's" in capsys.readouterr().err


@pytest.mark.usefixtures("_handlers_restored")
def test_a_configuration_that_cannot_be_read_and_a_wrong_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainer.__main__.main([str(tmp_path / "none.json")]) == 3
    assert "none.json cannot be used" in capsys.readouterr().err
    assert trainer.__main__.main([]) == 2
    assert capsys.readouterr().err == "usage: python -m trainer CONFIG.json\n"
    assert trainer.__main__.main(["--help"]) == 0
    assert capsys.readouterr().out == "usage: python -m trainer CONFIG.json\n"


@pytest.mark.usefixtures("_handlers_restored")
def test_a_loop_of_links_is_nothing_to_resume_from(tiny_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    path = write_config(tmp_path, tiny_run.config(run={"resume": str(tmp_path / "loop")}))
    assert trainer.__main__.main([str(path)]) == 1
    err = capsys.readouterr().err
    assert f"error: run.resume {tmp_path / 'loop'}: nothing to resume from" in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("_handlers_restored")
@pytest.mark.parametrize("name", ["open_shards", "packing_waste"])
def test_a_signal_while_loading_stops_the_run(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    release, loading = threading.Event(), []

    def slow(*_: Any) -> None:
        loading.append(threading.current_thread())
        os.kill(os.getpid(), signal.SIGTERM)
        release.wait(ENDS_WITHIN_S)
        raise TrainerError("released")

    monkeypatch.setattr(trainer.pipeline, name, slow)
    monkeypatch.setattr(trainer.pipeline, "JOIN_S", 0.1)
    assert trainer.__main__.main([str(write_config(tmp_path, tiny_run.config()))]) == 143
    assert [event["event"] for event in events_of(tmp_path)] == ["started", "failed"]
    release.set()
    loading[0].join(ENDS_WITHIN_S)


@pytest.mark.parametrize("module", ["prepare", "evaluate", "export", "smoke"])
def test_ctrl_c_while_a_command_imports_torch_is_one_word(tmp_path: Path, module: str) -> None:
    slow = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    for name in ("numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(slow)
    # a test run in the background of a script inherits an ignored SIGINT, and so would its children
    command = ["env", "--default-signal=INT", sys.executable, "-m", f"trainer.{module}"]
    paths = os.pathsep.join([str(tmp_path), str(Path(trainer.pipeline.__file__).parents[1])])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_who_imports_the_package_keeps_its_own_hook() -> None:
    told = "import sys, trainer.config; sys.exit(sys.excepthook is not sys.__excepthook__)"
    assert subprocess.run([sys.executable, "-c", told], timeout=ENDS_WITHIN_S, check=False).returncode == 0
