"""A laptop and a host in one temporary folder: the real `dflashctl`, host `local`, and trainers that fit on a screen."""

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tiny import TinyRun

DFLASHCTL = Path(sys.executable).with_name("dflashctl")

EXPERIMENT = """
hypothesis: {tag} runs
trainer:
  target: {{path: targets/x}}
  data: {{path: /}}
  pipeline: {{target_devices: [{device}], drafter_devices: [{device}], graphs: none}}
"""


@dataclass
class Done:
    """What one command left behind."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        found: dict[str, Any] = json.loads(self.stdout)
        assert found["schema"] == 1
        return found


class Bench:
    """The project folder on the laptop, and the commands typed in it."""

    executable = DFLASHCTL

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / ".dflash"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("DFLASHCTL_", "SSH_"))} | {
            "DFLASHCTL_STATE_DIR": str(folder / "state"),
            "DFLASHCTL_TRAINER": str(folder / "mytrainer"),
            "HOME": str(folder / "home"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }
        (folder / "bin").mkdir()
        (folder / "home").mkdir()
        self.experiment("quick")
        self.trainer("print('hello from the trainer')")

    def experiment(self, tag: str, device: str = "cpu") -> Path:
        path = self.folder / "experiments" / f"{tag}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(EXPERIMENT.format(tag=tag, device=device))
        return path

    def trainer(self, text: str, name: str = "__main__.py") -> Path:
        path = self.folder / "mytrainer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def hosts(self, text: str) -> None:
        (self.folder / "hosts.yaml").write_text(textwrap.dedent(text))

    def nvidia_smi(self, script: str) -> None:
        path = self.folder / "bin" / "nvidia-smi"
        path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def ssh_without_configuration(self) -> None:
        """`ssh` reads nothing of this machine's: it would find a home of its own, whatever HOME says."""
        path = self.folder / "bin" / "ssh"
        path.write_text(f'#!/bin/sh\nexec {shutil.which("ssh") or "ssh"} -F /dev/null "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # a test run in the background of a script inherits an ignored SIGINT, and so would its children
            ["env", "--default-signal=INT", DFLASHCTL, *args],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def __call__(self, *args: str, timeout: float = 120) -> Done:
        with self.start(*args) as process:
            stdout, stderr = process.communicate(timeout=timeout)
        assert b"Traceback" not in stderr, stderr.decode()
        return Done(process.returncode, stdout.decode(), stderr.decode())

    @staticmethod
    def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
        """The first true value of `condition`, asked again until a deadline."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.02)
        return value

    def run_folder(self, run: str) -> Path:
        return self.root / "runs" / run

    def launch_id(self, run: str) -> str:
        """What a run's processes are marked with."""
        (found,) = re.findall(r"DFLASHCTL_LAUNCH_ID=(\w+)", (self.run_folder(run) / "run.sh").read_text())
        return found

    def marked(self, run: str) -> list[int]:
        """Living processes that carry the run's mark."""
        launch_id = self.launch_id(run)
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = path.read_bytes()
                state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"DFLASHCTL_LAUNCH_ID={launch_id}".encode() in environment and state != "Z":
                found.append(int(path.parent.name))
        return found

    def end_runs(self) -> None:
        """Kill what runs under `root`, each run's wrapper first: it may not have come to start its trainer."""
        for folder in (self.root / "runs").glob("*-*/"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                wrapper = int((folder / "pid").read_text().split()[0])
                if b"run.sh" in Path(f"/proc/{wrapper}/cmdline").read_bytes():
                    os.killpg(wrapper, 9)
            for pid in self.marked(folder.name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.end_runs()


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> "TinyRun":
    """A random target, its tokenizer and shards, in a folder that tests only read."""
    import tiny

    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system of its own, with the given options."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"mount{len(mounted)}"
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True, timeout=20)
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True, timeout=20)
