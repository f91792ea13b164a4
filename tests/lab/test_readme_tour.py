"""The README's tour of a Proxmox container, typed line by line with the files of this repository."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

from labkit.laptop import SLEEPER, ssh_config
from labkit.smi import IDLE_H200_PAIR

TREE = Path(__file__).parents[2]


def typed() -> list[list[str]]:
    """The commands of the section, without their comments."""
    _, _, section = (TREE / "README.md").read_text().partition("## The same in a Proxmox container")
    lines = re.findall(r"^    dflashctl (.*?)(?:\s+#.*)?$", section.partition("\n## ")[0], re.MULTILINE)
    return [line.split() for line in lines]


def eight_cards() -> str:
    header, first, _ = IDLE_H200_PAIR.splitlines()
    uuids = [f"GPU-4d900621-81f0-00be-a4f9-408f47134ea{number}" for number in range(8)]
    rows = [re.sub(r"^0, \S+", f"{number}, {uuid},", first) for number, uuid in enumerate(uuids)]
    return "\n".join([header, *rows]) + "\n"


def test_every_line_does_what_it_says(bench, lab, ct) -> None:
    shutil.copy(TREE / "hosts.yaml", bench.folder)
    shutil.copytree(TREE / "experiments", bench.folder / "experiments", dirs_exist_ok=True)
    ssh_config(bench, lab.ssh_config)
    bench.trainer(SLEEPER)
    python = ct.path("/usr/bin/python3")
    python.unlink()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for folder in ("targets/qwen3-8b", "data/qwen3-8b"):  # which the README says to put there
        ct.path(f"/workspace/{folder}").mkdir(parents=True)
    smi = lab.smi_in(ct)
    smi.install()
    smi.gpus(eight_cards())

    said = {}
    for words in typed():
        if words[0] == "tail":
            with bench.start(*words) as process:
                assert process.stdout.readline() == b"up\n"
                os.killpg(process.pid, signal.SIGINT)
                assert process.wait(timeout=60) == 130
            continue
        done = bench(*words)
        assert done.exit_code == 0, (words, done.stderr)
        said[words[0]] = done.stdout
    assert list(said) == ["gpus", "deploy", "launch", "status", "stop"]
    assert said["gpus"].count("idle") == 8
    assert "threadwarm-1" in said["launch"]
    assert "running" in said["status"]
    assert "stopped" in said["stop"]
    assert ct.processes().keys() == {1}
    environment = (ct.workspace / "runs/threadwarm-1/run.sh").read_text()
    assert "CUDA_VISIBLE_DEVICES=GPU-4d900621-81f0-00be-a4f9-408f47134ea0,GPU-" in environment
