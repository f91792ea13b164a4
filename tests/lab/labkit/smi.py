"""The test's side of the fake nvidia-smi: what it answers, where it stands on PATH, whether it hangs."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from labkit.node import Machine

PROGRAM = Path(__file__).parents[1] / "nvidia-smi"
ANSWERS = "/etc/nvidia-smi.lab"
"""Where the program finds its answers, on the machine it stands on."""

IDLE_H200_PAIR = """\
index, uuid, name, memory.total [MiB], memory.used [MiB], memory.reserved [MiB], memory.free [MiB], \
utilization.gpu [%], utilization.memory [%], temperature.gpu, power.draw [W], mig.mode.current, driver_version, \
ecc.errors.uncorrected.volatile.total, clocks_event_reasons.active
0, GPU-4d900621-81f0-00be-a4f9-408f47134ea1, NVIDIA H200, 143771 MiB, 0 MiB, 616 MiB, 143156 MiB, 0 %, 0 %, 38, \
121.09 W, Disabled, 580.159.04, 0, 0x0000000000000001
1, GPU-7694f615-a85b-389a-8e1f-80f0505d3c36, NVIDIA H200, 143771 MiB, 0 MiB, 616 MiB, 143156 MiB, 0 %, 0 %, 40, \
120.69 W, Disabled, 580.159.04, 0, 0x0000000000000001
"""
"""Two idle cards as a real driver prints them (uuids replaced)."""

NO_APPS = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"


class FakeSmi:
    """An nvidia-smi on the node or in a container. Tables are CSV with a header line, as `--format=csv` prints them."""

    def __init__(self, machine: Machine) -> None:
        """Name the machine; nothing is there before `install`."""
        self._machine = machine

    def install(self, directory: str = "/usr/bin") -> None:
        """Put it into a directory of PATH, answering with two idle cards and no processes."""
        self.remove()
        answers = self._machine.path(ANSWERS)
        answers.mkdir()
        os.chown(answers, self._machine.owner_uid, self._machine.owner_uid)
        program = self._machine.path(f"{directory}/nvidia-smi")
        shutil.copy(PROGRAM, program)
        program.chmod(0o755)
        self.gpus(IDLE_H200_PAIR)
        self.apps(NO_APPS)

    def gpus(self, *tables: str) -> None:
        """Set what --query-gpu answers from; several tables are given one a call, and the last one stays."""
        for old in self._machine.path(ANSWERS).glob("gpu.*"):
            old.unlink()
        for number, table in enumerate(tables, start=1):
            self._write(f"gpu.{number}.csv", table)

    def apps(self, table: str) -> None:
        """Set what --query-compute-apps answers from."""
        self._write("apps.csv", table)

    def says(self, text: str, *, status: int = 0, stderr: str = "", only_for: str = "") -> None:
        """Answer with this very text, to any arguments or only to `-L`, `-q -x`, `plain`, --query-gpu (`gpu`), `apps`."""
        name = {"": "any", "-L": "list", "-q -x": "xml"}.get(only_for, only_for)
        self._write(f"{name}.out", text)
        self._write(f"{name}.err", stderr)
        self._write(f"{name}.rc", str(status))

    def sample(self, text: str) -> None:
        """Answer as a recorded sample did: its first line is `# cmd: nvidia-smi ARGUMENTS ... ; rc N`."""
        comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
        body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
        found = re.search(r"; rc (\d+)", comments)
        fields = re.search(r"--query-(gpu|compute-apps)=(\S+)", comments)
        if not fields:
            self.says(body, status=int(found.group(1)) if found else 0)
            return
        table = body if "noheader" not in comments else fields.group(2).replace(",", ", ") + "\n" + body
        self.gpus(table) if fields.group(1) == "gpu" else self.apps(table)

    def hangs(self, seconds: float, *, ignores_term: bool = False) -> None:
        """Sleep before every answer; deaf to SIGTERM if asked, as a process in D state is to everything."""
        self._write("hang_s", f"{seconds:g}")
        if ignores_term:
            self._write("deaf", "")

    def calls(self) -> list[str]:
        """List the arguments of every call so far, joined by spaces."""
        log = self._machine.path(ANSWERS) / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def remove(self) -> None:
        """Take it away: `nvidia-smi: not found`."""
        for directory in ("/usr/bin", "/usr/local/bin"):
            self._machine.path(f"{directory}/nvidia-smi").unlink(missing_ok=True)
        shutil.rmtree(self._machine.path(ANSWERS), ignore_errors=True)

    def _write(self, name: str, text: str) -> None:
        (self._machine.path(ANSWERS) / name).write_text(text)


def csv(header: str, rows: Sequence[str]) -> str:
    """Make a table for `gpus` or `apps`."""
    return "\n".join([header, *rows]) + "\n"
