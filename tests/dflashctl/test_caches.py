"""Compile caches: fresh for each run, shared on request, and never pulled away under anybody."""

import getpass
import subprocess
import sys
from pathlib import Path

import pytest

FILL = """
import json, os, pathlib, sys
cache = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
cache.mkdir(parents=True, exist_ok=True)
found = sorted(p.name for p in cache.iterdir())
print(found, flush=True)
(cache / f"kernel{len(found)}").touch()
if %r:
    run = pathlib.Path(sys.argv[1]).parent
    (run / "events.jsonl").write_text(json.dumps({"event": "gate_open"}) + "\\n")
sys.exit(%d)
"""


def launch(bench, *more: str, seconds: str = "30"):
    return bench("launch", "--tag", "quick", "--startup-seconds", seconds, "--json", *more)


def log_of(bench, run: str) -> str:
    return (bench.run_folder(run) / "train.log").read_text().strip()


def test_each_run_has_caches_of_its_own_and_leaves_none(bench) -> None:
    bench.trainer(FILL % (True, 0))
    for run in ("quick-1", "quick-2"):
        launch(bench)
        assert log_of(bench, run) == "[]"
        assert not (bench.run_folder(run) / "cache").exists()


def test_a_warm_cache_is_shared_by_runs_alike(bench) -> None:
    bench.trainer(FILL % (True, 0))
    launch(bench, "--warm-cache")
    launch(bench, "--warm-cache")
    assert log_of(bench, "quick-2") == "['kernel0']"
    bench.trainer(FILL % (True, 0) + "# another release")
    launch(bench, "--warm-cache")
    assert log_of(bench, "quick-3") == "[]"


def test_a_warm_cache_in_which_a_run_died_before_its_gate_is_emptied(bench) -> None:
    bench.trainer(FILL % (False, 3))
    assert launch(bench, "--warm-cache").exit_code == 9
    assert launch(bench, "--warm-cache").exit_code == 9
    assert log_of(bench, "quick-2") == "[]"


def test_a_warm_cache_with_somebody_in_it_is_not_emptied(bench) -> None:
    bench.trainer("import time, pathlib, sys\n" + FILL.replace("sys.exit(%d)", "time.sleep(600)") % True)
    launch(bench, "--warm-cache", seconds="0")
    events = bench.run_folder("quick-1") / "events.jsonl"
    bench.until(events.exists)
    assert log_of(bench, "quick-1") == "[]"
    events.unlink()
    launch(bench, "--warm-cache", seconds="0")
    bench.until(lambda: "kernel0" in log_of(bench, "quick-2"))


@pytest.fixture
def default_cache(bench) -> Path:
    bench.env["TMPDIR"] = str(bench.folder)
    bench.env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    cache = bench.folder / f"torchinductor_{getpass.getuser()}"
    cache.mkdir()
    (cache / "kernel.so").write_bytes(b"\0" * 4096)
    return cache


def test_clear_cache_empties_the_default_one(bench, default_cache: Path) -> None:
    done = launch(bench, "--clear-cache")
    assert done.exit_code == 0
    assert done.document["cleared_cache"] == str(default_cache)
    assert not default_cache.exists()


def test_clear_cache_does_not_follow_a_link(bench, default_cache: Path) -> None:
    precious = default_cache.rename(bench.folder / "precious")
    default_cache.symlink_to(precious)
    done = launch(bench, "--clear-cache")
    assert done.exit_code == 8
    assert "reached through a symlink" in done.document["error"]["message"]
    assert (precious / "kernel.so").exists()
    assert not (bench.root / "runs").exists()


def test_clear_cache_refuses_while_a_process_lives_in_it(bench, default_cache: Path) -> None:
    script = "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print('in', flush=True)"
    user = subprocess.Popen(
        [sys.executable, "-c", f"{script}; time.sleep(600)", default_cache / "kernel.so"], stdout=subprocess.PIPE
    )
    try:
        assert user.stdout
        assert user.stdout.readline() == b"in\n"
        done = launch(bench, "--clear-cache")
        assert done.exit_code == 8
        assert f"in use by pid {user.pid}" in done.document["error"]["message"]
        assert (default_cache / "kernel.so").exists()
    finally:
        user.kill()
        user.communicate(timeout=10)


def test_clear_cache_refuses_a_folder_that_is_no_such_cache(bench) -> None:
    precious = bench.folder / "precious"
    precious.mkdir()
    bench.env["TORCHINDUCTOR_CACHE_DIR"] = str(precious)
    done = launch(bench, "--clear-cache")
    assert done.exit_code == 8
    assert "is left alone" in done.document["error"]["message"]
    assert precious.exists()
