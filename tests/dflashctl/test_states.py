"""What `status` says of a run's life: its times, whether it stands still, and whose life it is."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest


def test_durations_come_from_a_clock_that_nobody_sets(bench) -> None:
    bench.trainer("import time; time.sleep(1)")
    assert bench("launch", "--tag", "quick", "--startup-seconds", "30").exit_code == 0
    times = bench.run_folder("quick-1") / "times"
    began, ended = (line.split() for line in times.read_text().splitlines())
    assert (began[0], ended[0]) == ("started", "ended")
    ended[1] = str(int(began[1]) - 3600)  # somebody set the clock back an hour meanwhile
    times.write_text(" ".join(began) + "\n" + " ".join(ended) + "\n")
    state = bench("status", "--json").document
    assert 1 <= state["duration_s"] < 30
    assert state["ended_at"] < state["started_at"]
    times.write_text("started not-a-number\n")
    assert bench("status", "--json").document["duration_s"] >= 0


def test_how_long_a_lost_run_ran_is_not_known(bench) -> None:
    bench.trainer("import time; time.sleep(600)")
    assert bench("launch", "--tag", "quick", "--startup-seconds", "0.5").exit_code == 0
    wrapper = int((bench.run_folder("quick-1") / "pid").read_text().split()[0])
    for pid in [wrapper, *bench.marked("quick-1")]:  # in this order: the wrapper writes down how its trainer ends
        os.kill(pid, signal.SIGKILL)
    bench.until(lambda: bench("status", "--json").document["state"] == "lost")
    assert bench("status", "--json").document["duration_s"] is None


@pytest.mark.parametrize(
    ("overdue", "age_s", "stalled"),
    [(False, 0, False), (True, 0, True), (False, 1000, True)],
    ids=["well", "says so", "silent"],
)
def test_a_living_run_that_does_not_move_is_stalled(bench, overdue: bool, age_s: int, stalled: bool) -> None:
    bench.trainer(
        f"""
        import json, os, time
        with open("events.jsonl", "w") as file:
            file.write(json.dumps({{"event": "heartbeat", "step": 7, "idle_s": 1.0, "overdue": {overdue}}}) + "\\n")
        started, clock, rest = open("times").read().split(" ", 2)
        with open("times", "w") as file:
            file.write(f"{{started}} {{int(clock) - 2000}} {{rest}}")
        os.utime("events.jsonl", (time.time() - {age_s},) * 2)
        print("up", flush=True)
        time.sleep(600)
        """
    )
    bench("launch", "--tag", "quick", "--startup-seconds", "0")
    bench.until(lambda: bench("tail", "--no-follow").stdout == "up\n")
    state = bench("status", "--json").document
    assert (state["state"], state["stalled"]) == ("running", stalled)
    assert state["last_event_age_s"] >= age_s
    assert ("running, stalled" in bench("status").stdout) is stalled
    bench("stop", "quick-1")
    assert bench("status", "--json").document["stalled"] is False


def helpers_of(bench) -> list[int]:
    """The interpreters that do a command's work on the host."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"-B" in words and bench.env["PATH"].encode() in (path.parent / "environ").read_bytes():
                found.append(int(path.parent.name))
    return found


def test_a_launch_whose_watcher_is_killed_finds_its_run(bench) -> None:
    bench.trainer("import time; print('up', flush=True); time.sleep(600)")
    bench("deploy")
    process = bench.start("launch", "--tag", "quick", "--startup-seconds", "60", "--json")
    log = bench.run_folder("quick-1") / "train.log"
    bench.until(lambda: log.exists() and log.read_text() == "up\n")
    for pid in helpers_of(bench):
        os.kill(pid, signal.SIGKILL)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(stdout)["run"] == "quick-1"
    assert "found by its launch id" in json.loads(stdout)["warning"]
    assert bench("runs").stdout.startswith("quick-1\t")


def test_a_run_that_was_claimed_and_never_began_is_none(bench) -> None:
    slow = bench.folder / "bin/setsid"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    bench("deploy")
    process = bench.start("launch", "--tag", "quick", "--startup-seconds", "0")
    bench.until((bench.run_folder("quick-1") / "starting").exists)
    bench.until(lambda: len(helpers_of(bench)) > 0)
    for pid in helpers_of(bench):
        os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, b"nothing was started" in stderr) == (8, True)
    assert bench("status", "local:quick-1", "--json").document["state"] == "stopped"


def test_a_second_life_by_hand_does_not_show_the_first_ones_events(bench) -> None:
    bench.trainer(
        """
        import json, pathlib, time
        if pathlib.Path("events.jsonl").exists():
            print("again", flush=True)
            time.sleep(600)
        pathlib.Path("events.jsonl").write_text(json.dumps({"event": "failed", "error": "old"}) + "\\n")
        """
    )
    assert bench("launch", "--tag", "quick", "--startup-seconds", "30").exit_code == 0
    assert bench("status", "--json").document["error"] == "old"
    events = bench.run_folder("quick-1") / "events.jsonl"
    os.utime(events, (time.time() - 1000,) * 2)
    subprocess.run(["sh", str(bench.run_folder("quick-1") / "run.sh")], check=True, timeout=60)
    bench.until(lambda: "again" in (bench.run_folder("quick-1") / "train.log").read_text())
    state = bench("status", "--json").document
    assert (state["state"], state["last_event"], state["error"], state["stalled"]) == ("running", None, None, False)
