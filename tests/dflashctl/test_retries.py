"""`launch --retries N`: stays with the run, and goes on by itself after a death that more tries can mend."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from trainer.errors import ConfigError, NonFiniteError

BEGIN = """
import json, os, pathlib, signal, sys, time
resumed = json.loads(pathlib.Path(sys.argv[1]).read_text())["run"]["resume"]
print("resumes", resumed, flush=True)
def checkpoint():
    pathlib.Path("checkpoints/step-10").mkdir(parents=True)
    os.symlink("step-10", "checkpoints/latest")
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def outlive_the_start():  # which is over once this run is in the history
    history = pathlib.Path("../../../state/history.jsonl")
    while not (history.exists() and f'"{os.path.basename(os.getcwd())}"' in history.read_text()):
        time.sleep(0.02)
"""


def go(bench, retries: int, *more: str, tag: str = "quick", seconds: str = "0", timeout: float = 240):
    return bench(
        "launch", "--tag", tag, "--retries", str(retries), "--startup-seconds", seconds, "--json", *more, timeout=timeout
    )


def chain(bench) -> list[tuple[str, str | None, str, int | None]]:
    """Oldest first, as `runs` shows them."""
    found = bench("runs", "--json").document["runs"]
    return [(run["run"], run["resumes"], run["state"], run["exit_code"]) for run in reversed(found)]


def test_a_killed_run_is_resumed_from_its_newest_checkpoint_and_finishes(bench, tiny_run) -> None:
    shutil.copytree(tiny_run.root, bench.root)
    config = tiny_run.config(run={"steps": 400, "checkpoint_every": 20, "keep_checkpoints": 2})
    del config["run"]["root"]
    (bench.folder / "experiments/tiny.yaml").write_text(json.dumps({"hypothesis": "it trains", "trainer": config}))
    del bench.env["DFLASHCTL_TRAINER"]
    process = bench.start("launch", "--tag", "tiny", "--retries", "2", "--startup-seconds", "0")
    latest = bench.run_folder("tiny-1") / "checkpoints/latest"
    bench.until(latest.is_dir, 120)
    (trainer,) = bench.marked("tiny-1")
    os.kill(trainer, signal.SIGKILL)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr.decode()
    begun = f"runs/tiny-1/checkpoints/{latest.resolve().name}"
    lines = [line for line in stderr.decode().splitlines() if "tiny-" in line]
    assert lines[-3:] == [
        "local:tiny-1 killed by signal 9",
        f"retry 1 of 2: from {begun}",
        "local:tiny-2 exited 0",
    ]
    assert json.loads((bench.run_folder("tiny-2") / "run.json").read_text())["resumes"] == "tiny-1"
    assert json.loads((bench.run_folder("tiny-2") / "config.json").read_text())["run"]["resume"] == begun
    events = [json.loads(line) for line in (bench.run_folder("tiny-2") / "events.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert (steps[0], steps[-1]) == (int(latest.resolve().name.removeprefix("step-")) + 1, 400)
    assert chain(bench) == [("tiny-1", None, "killed", 137), ("tiny-2", "tiny-1", "exited", 0)]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (0, None),
        (2, "exit code 2 is a wrong call"),
        (ConfigError.exit_code, "exit code 3 is configuration, data or target"),
        (NonFiniteError.exit_code, "exit code 4 is a loss that is not finite"),
    ],
)
def test_what_more_tries_do_not_mend_is_not_tried_again(bench, code: int, why: str | None) -> None:
    bench.trainer(f"{BEGIN}\ncheckpoint()\noutlive_the_start()\nsys.exit({code})")
    done = go(bench, 3)
    assert done.exit_code == min(code, 1)
    assert done.document["run"] == "quick-1"
    assert [run["exit_code"] for run in done.document["tries"]] == [code]
    assert (f"local:quick-1 is not tried again: {why}, which more tries do not mend" in done.stderr) is bool(why)
    assert not bench.run_folder("quick-2").exists()


def test_a_run_that_somebody_stops_is_not_tried_again(bench) -> None:
    bench.trainer(f"{BEGIN}\ncheckpoint()\ntime.sleep(600)")
    process = bench.start("launch", "--tag", "quick", "--retries", "3", "--startup-seconds", "0")
    bench.until((bench.run_folder("quick-1") / "checkpoints/latest").is_dir)
    bench.until(lambda: bench("runs").stdout)
    assert bench("stop", "quick-1").exit_code == 0
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert b"local:quick-1 is not tried again: it was stopped\n" in stderr
    assert not bench.run_folder("quick-2").exists()


def test_a_crash_is_tried_as_often_as_asked_and_each_run_names_its_parent(bench) -> None:
    bench.trainer(f"{BEGIN}\ncheckpoint()\noutlive_the_start()\nsys.exit(1)")
    done = go(bench, 2)
    assert (done.exit_code, done.document["run"], done.document["exit_code"]) == (1, "quick-3", 1)
    assert [(run["run"], run["resumes"]) for run in done.document["tries"]] == [
        ("quick-1", None),
        ("quick-2", "quick-1"),
        ("quick-3", "quick-2"),
    ]
    assert "local:quick-3 is not tried again: that was the last of 2 retries" in done.stderr
    assert [run[:2] for run in chain(bench)] == [("quick-1", None), ("quick-2", "quick-1"), ("quick-3", "quick-2")]
    assert bench("tail", "quick-3").stdout == "resumes runs/quick-2/checkpoints/step-10\n"


def test_a_death_after_the_last_checkpoint_is_not_tried_again(bench) -> None:
    bench.trainer(f"{BEGIN}\ncheckpoint()\noutlive_the_start()\ndie()")
    done = go(bench, 3, "--set", "run.steps=10")
    assert done.exit_code == 1
    last = "runs/quick-1/checkpoints/step-10"
    assert f"local:quick-1 is not tried again: {last} is that of its last step\n" in done.stderr
    resumed = bench("launch", "--resume", "quick-1")
    assert (resumed.exit_code, "quick-1 has finished all its steps" in resumed.stderr) == (8, True)
    assert not bench.run_folder("quick-2").exists()


def test_two_deaths_without_progress_end_it(bench) -> None:
    bench.trainer(f"{BEGIN}\nif resumed is None:\n    checkpoint()\noutlive_the_start()\ndie()")
    done = go(bench, 9)
    assert done.exit_code == 1
    assert "retry 2 of 9: from the checkpoint of quick-1 again" in done.stderr
    assert "local:quick-3 is not tried again: the last two runs have written no new checkpoint" in done.stderr
    assert [run[:2] for run in chain(bench)] == [("quick-1", None), ("quick-2", "quick-1"), ("quick-3", "quick-1")]


def test_without_a_checkpoint_it_is_started_anew_once_if_it_survived_its_start(bench) -> None:
    bench.trainer(f"{BEGIN}\noutlive_the_start()\ndie()")
    done = go(bench, 9)
    assert done.exit_code == 1
    assert "retry 1 of 9: from the start, for want of a checkpoint" in done.stderr
    assert [run[:2] for run in chain(bench)] == [("quick-1", None), ("quick-2", None)]
    bench.trainer(f"{BEGIN}\ndie()")
    died = go(bench, 9, seconds="30")
    assert (died.exit_code, died.document["error"]["code"]) == (9, "died_at_start")
    assert not bench.run_folder("quick-4").exists()


def test_a_retry_that_dies_in_its_start_up_window_counts_as_one(bench) -> None:
    bench.trainer(f"{BEGIN}\nif resumed is None:\n    checkpoint()\n    outlive_the_start()\ndie()")
    done = go(bench, 9, seconds="10")
    assert done.exit_code == 1
    assert [(run["run"], run["state"], run["exit_code"]) for run in done.document["tries"]] == [
        (f"quick-{n}", "killed", 137) for n in (1, 2, 3)
    ]
    assert "quick-2 died within" in done.stderr


def test_the_same_code_settings_and_secrets_go_on(bench) -> None:
    (bench.folder / ".env").write_text("TOKEN=hf_abcdef\n")
    mend = f"{BEGIN}\nprint(os.environ['TOKEN'])\nif resumed:\n    sys.exit(0)\nopen('up', 'w')\n"
    bench.trainer(mend + "while not os.path.exists('go'):\n    time.sleep(0.02)\ncheckpoint()\ndie()")
    words = ("--set", "optim.lr=3e-4", "--env-file", ".env", "--json")
    process = bench.start("launch", "--tag", "quick", "--retries", "1", "--startup-seconds", "0", *words)
    first, second = bench.run_folder("quick-1"), bench.run_folder("quick-2")
    bench.until((first / "up").exists)
    bench.trainer("import sys; sys.exit('a newer trainer')")
    bench.experiment("quick", "cuda:0")
    (bench.folder / ".env").unlink()
    (first / "go").touch()
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr.decode()
    assert "hf_abcdef" not in stdout.decode() + stderr.decode()
    records = [json.loads((folder / "run.json").read_text()) for folder in (first, second)]
    assert records[0]["release"] == records[1]["release"]
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, second)]
    assert configs[1]["run"].pop("resume") == "runs/quick-1/checkpoints/step-10"
    assert configs[0]["run"].pop("resume") is None
    assert configs[0] == configs[1]
    assert (second / "train.log").read_text().endswith("hf_abcdef\n")


def test_a_trainer_that_outlives_its_wrapper_does_not_go_on_beside_the_next(bench) -> None:
    bench.trainer(f"{BEGIN}\nif resumed:\n    sys.exit(0)\ncheckpoint()\ntime.sleep(600)")
    process = bench.start("launch", "--tag", "quick", "--retries", "1", "--startup-seconds", "0")
    bench.until((bench.run_folder("quick-1") / "checkpoints/latest").is_dir)
    bench.until(lambda: bench("runs").stdout)
    os.kill(int((bench.run_folder("quick-1") / "pid").read_text().split()[0]), signal.SIGKILL)
    assert bench.marked("quick-1")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr.decode()
    assert b"local:quick-1 lost" in stderr
    assert not bench.marked("quick-1")
    assert [run[1:3] for run in chain(bench)] == [(None, "lost"), ("quick-1", "exited")]


# leases of every root are seen: each worker of a test run has cards of its own
FIRST, SECOND = (f"GPU-{name}-{os.getpid()}" for name in ("retry0", "retry1"))


@pytest.fixture
def cuda(bench):
    """Experiment `cuda`, and two GPUs: the first holds as many MiB as file `used` says, and a look fails where `broken` is."""
    bench.used, bench.broken = bench.folder / "used", bench.folder / "broken"
    bench.used.write_text("0")
    bench.nvidia_smi(
        f"""
        rm {bench.broken} 2>/dev/null && exit 9
        case "$1" in --query-compute-apps=*) exit 0;; esac
        echo "index, uuid, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%]"
        echo "0, {FIRST}, NVIDIA H200, $(cat {bench.used}), 143771, 0"
        echo "1, {SECOND}, NVIDIA H200, 0, 143771, 0"
        """
    )
    bench.experiment("cuda", "cuda:0")
    write = f"pathlib.Path({str(bench.used)!r}).write_text('9000')"
    bench.trainer(f"{BEGIN}\nif resumed:\n    sys.exit(0)\n{write}\ncheckpoint()\noutlive_the_start()\ndie()")
    return bench


RETRY = ("launch", "--tag", "cuda", "--retries", "1", "--startup-seconds", "0", "--gpus", "0")


def read_until(process, words: bytes) -> None:
    said = b""
    while words not in said:
        line = process.stderr.readline()
        assert line, said.decode()
        said += line


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "force"])
def test_the_gpu_of_the_dead_run_is_waited_for(cuda, force: tuple[str, ...]) -> None:
    """Also where the first try took it by force: what was known to be in the way then may be somebody else's now."""
    cuda.used.write_text("5000" if force else "0")
    process = cuda.start(*RETRY, *force)
    read_until(process, b"waiting: ")
    assert not cuda.run_folder("cuda-2").exists()
    cuda.used.write_text("0")
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert json.loads((cuda.run_folder("cuda-2") / "run.json").read_text())["gpus"][0]["uuid"] == FIRST


def test_one_look_at_the_gpus_that_fails_ends_nothing(cuda) -> None:
    fail = f"pathlib.Path({str(cuda.broken)!r}).touch()"
    cuda.trainer(f"{BEGIN}\nif resumed:\n    sys.exit(0)\n{fail}\ncheckpoint()\noutlive_the_start()\ndie()")
    done = cuda(*RETRY)
    assert done.exit_code == 0, done.stderr
    assert not cuda.broken.exists()
    assert [run[1:3] for run in chain(cuda)] == [(None, "killed"), ("cuda-1", "exited")]


def test_to_stop_a_dead_run_ends_its_retries(cuda) -> None:
    """At once, while its GPUs are still busy."""
    process = cuda.start(*RETRY)
    read_until(process, b"waiting: ")
    assert cuda("stop", "cuda-1").stdout == "local:cuda-1 had already ended: killed by signal 9\n"
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert b"local:cuda-1 is not tried again: host local: cuda-1 was stopped by " in stderr
    assert not cuda.run_folder("cuda-2").exists()
    cuda.used.write_text("0")
    by_hand = cuda("launch", "--resume", "cuda-1", "--gpus", "0", "--startup-seconds", "30")
    assert by_hand.exit_code == 0, by_hand.stderr


def test_two_do_not_go_on_from_one_run(cuda) -> None:
    process = cuda.start(*RETRY)
    read_until(process, b"waiting: ")
    assert cuda("launch", "--resume", "cuda-1", "--gpus", "1", "--startup-seconds", "30").exit_code == 0
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert b"local:cuda-1 is not tried again: host local: cuda-2 goes on from cuda-1 already\n" in stderr
    assert not cuda.run_folder("cuda-3").exists()


def test_a_run_that_lives_is_followed_and_tried_again_if_it_dies(bench) -> None:
    wait = "while not os.path.exists('go'):\n    time.sleep(0.02)\n"
    bench.trainer(f"{BEGIN}\nif resumed:\n    sys.exit(0)\ncheckpoint()\n{wait}die()")
    assert bench("launch", "--tag", "quick", "--startup-seconds", "0").exit_code == 0
    process = bench.start("launch", "--resume", "quick-1", "--retries", "2", "--startup-seconds", "0", "--json")
    read_until(process, b"local:quick-1 still lives; it is followed, and tried again if it dies\n")
    (bench.run_folder("quick-1") / "go").touch()
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr.decode()
    assert [(run["run"], run["resumes"]) for run in json.loads(stdout)["tries"]] == [("quick-1", None), ("quick-2", "quick-1")]


def test_a_run_that_lives_and_dies_without_progress_is_tried_from_where_it_began(bench) -> None:
    wait = "while not os.path.exists('go'):\n    time.sleep(0.02)\n"
    bench.trainer(f"{BEGIN}\nif resumed is None:\n    checkpoint()\n    die()\n{wait}die()")
    bench("launch", "--tag", "quick", "--startup-seconds", "30")
    assert bench("launch", "--resume", "quick-1", "--startup-seconds", "0").exit_code == 0
    process = bench.start("launch", "--resume", "quick-2", "--retries", "1", "--startup-seconds", "0")
    read_until(process, b"quick-2 still lives")
    (bench.run_folder("quick-2") / "go").touch()
    read_until(process, b"retry 1 of 1: from the checkpoint of quick-1 again\n")
    bench.until(bench.run_folder("quick-3").is_dir)
    bench.until((bench.run_folder("quick-3") / "pid").exists)
    (bench.run_folder("quick-3") / "go").touch()
    process.communicate(timeout=120)
    assert [run[:2] for run in chain(bench)] == [("quick-1", None), ("quick-2", "quick-1"), ("quick-3", "quick-1")]


def test_a_reader_who_goes_away_ends_the_retries_and_leaves_the_run_alone(bench) -> None:
    bench.trainer("import time\nwhile True:\n    print('up', flush=True)\n    time.sleep(0.05)")
    process = bench.start("launch", "--tag", "quick", "--retries", "3", "--startup-seconds", "0")
    assert process.stdout
    assert process.stderr
    while process.stdout.readline() != b"up\n":
        pass
    process.stdout.close()
    assert process.wait(60) == 1
    said = process.stderr.read().decode()
    process.stderr.close()
    end = (
        "nobody reads the output any more, and nothing is tried again; local:quick-1 is left alone: dflashctl status quick-1\n"
    )
    assert said.endswith(end)
    assert bench("status", "quick-1", "--json").document["state"] == "running"
    assert bench("stop", "quick-1").exit_code == 0


def test_ctrl_c_leaves_the_run_alone_and_ends_the_retries(bench) -> None:
    first = "if resumed is None:\n    checkpoint()\n    outlive_the_start()\n    die()\n"
    bench.trainer(f"{BEGIN}\n{first}print('up', flush=True)\ntime.sleep(600)")
    process = bench.start("launch", "--tag", "quick", "--retries", "3", "--startup-seconds", "0", "--json")
    log = bench.run_folder("quick-2") / "train.log"
    bench.until(lambda: log.exists() and "up" in log.read_text())
    assert process.stderr
    while process.stderr.readline() != b"up\n":
        pass
    os.killpg(process.pid, signal.SIGINT)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    document = json.loads(stdout)
    assert document["error"]["message"] == "local:quick-2 goes on, and nothing is tried again"
    assert [run["run"] for run in document["tries"]] == ["quick-1"]
    assert bench("status", "quick-2", "--json").document["state"] == "running"
    assert bench("stop", "quick-2").exit_code == 0
    assert not bench.run_folder("quick-3").exists()


def test_what_cannot_be_tried_again_later_is_refused_at_once(bench) -> None:
    done = bench("launch", "--tag", "quick", "--retries", "1", "--set", "run.resume=runs/old/checkpoints/latest")
    assert done.exit_code == 3
    assert "run.resume is set by --retries" in done.stderr
    assert not Path(bench.root / "runs").exists()
