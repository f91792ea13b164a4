"""The laptop of these tests: a `bench` (tests/conftest.py) whose host ct200 is the lab's container."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.lab import Lab

COUNTER = """
import pathlib, time
print("up", flush=True)
while not pathlib.Path("/workspace/go").exists():
    time.sleep(0.05)
for i in range(2000):
    print("line", i)
print("end")
"""
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


def point(
    bench: Any, lab: Lab, alias: str = "pve", vmid: int | None = 200, python: str = sys.executable, env: str = "{}"
) -> None:
    """Make host ct200 of `bench` the lab's container, with the lab's ssh configuration as the user's own."""
    container = f", container: {{kind: proxmox, id: {vmid}}}" if vmid else ""
    keys = f"ssh: {alias}, root: /workspace/my runs{container}, python: '{python}', env: {env}"
    bench.hosts(f"default: ct200\nhosts:\n  ct200: {{{keys}}}\n")
    ssh_config(bench, lab.ssh_config)
    bench.root = Path("/workspace/my runs")


def ssh_config(bench: Any, path: Path) -> None:
    """Make `path` the user's own ssh configuration."""
    wrapper = bench.folder / "bin/ssh"
    wrapper.write_text(f"#!/bin/sh\nexec {shutil.which('ssh')} -F '{path}' \"$@\"\n")
    wrapper.chmod(0o755)


def launch(bench: Any, *more: str, seconds: str = "0.5") -> Any:
    """Launch the experiment `quick`."""
    return bench("launch", "--tag", "quick", "--startup-seconds", seconds, "--json", *more)


@contextlib.contextmanager
def following(bench: Any) -> Iterator[Any]:
    """A `tail` that has shown the first line."""
    process = bench.start("tail")
    try:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)
