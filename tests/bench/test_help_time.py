"""`dflashctl --help` against the help of an empty typer app, each at its best of several runs side by side."""

import subprocess
import sys
import time
from pathlib import Path

EMPTY_APP = "import typer\napp = typer.Typer()\n@app.command()\ndef one(): ...\n@app.command()\ndef two(): ...\napp()"
RUNS = 9
ALLOWED = 1.3


def seconds(argv: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - start


def test_help_takes_at_most_1_3_times_an_empty_app(tmp_path: Path) -> None:
    app = tmp_path / "empty.py"
    app.write_text(EMPTY_APP)
    ours = [str(Path(sys.executable).with_name("dflashctl")), "--help"]
    empty = [sys.executable, str(app), "--help"]
    pairs = [(seconds(ours), seconds(empty)) for _ in range(RUNS)]
    ratio = min(pair[0] for pair in pairs) / min(pair[1] for pair in pairs)
    print(f"dflashctl --help / empty typer app --help: {ratio:.2f}")  # noqa: T201
    assert ratio <= ALLOWED
