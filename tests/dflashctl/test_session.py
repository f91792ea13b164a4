"""What goes over a `Remote` and what comes back: limits of time, noise, broken answers, processes that cannot be killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflashctl import stop
from dflashctl.errors import EnvironmentFault, ExitCode, HostError, RemoteTimeoutError, StopIncompleteError
from dflashctl.hosts import Host
from dflashctl.onhost import stop as onhost_stop
from dflashctl.remote import Completed, LocalRemote
from dflashctl.runs import History, RunRecord
from dflashctl.session import HostSession


def session(root: Path, remote=None, python: str = sys.executable) -> HostSession:
    return HostSession(Host(name="local", transport="local", root=str(root), python=python), remote or LocalRemote())


def test_a_script_that_outlives_its_time_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = f"{tmp_path}/alive"
    started = time.monotonic()
    with pytest.raises(RemoteTimeoutError, match="did not finish within 1 s") as caught:
        session(tmp_path).script(f"touch {mark}; sleep 600", timeout_s=1)
    assert caught.value.exit_code == ExitCode.TIMEOUT
    assert time.monotonic() - started < 60
    assert Path(mark).exists()
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert mark not in listed


@pytest.mark.parametrize("code", [0, 1, 126, 127, 255])
def test_a_scripts_own_exit_code_arrives(tmp_path: Path, code: int) -> None:
    done = session(tmp_path).script(f"echo out; echo err >&2; exit {code}")
    assert (done.exit_code, done.stdout, done.stderr) == (code, b"out\n", b"err\n")


def test_a_payload_arrives_byte_for_byte(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 4096
    done = session(tmp_path).script(f"head -c {len(payload)} | cksum; printf '\\0\\377'", payload)
    expected = subprocess.run(["cksum"], input=payload, capture_output=True, check=True).stdout
    assert done.stdout == expected + b"\0\377"


class Canned:
    """A remote that has already answered."""

    user = "root"

    def __init__(self, completed: Completed) -> None:
        self._completed = completed

    def exchange(self, argv, stdin, opening, timeout_s) -> Completed:
        return self._completed

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("completed", "says"),
    [
        (Completed(None, b"dflashctl-ready\n", b""), "the connection broke"),
        (Completed(255, b"", b"exec: not allowed here\n"), "exec: not allowed here"),
        (Completed(0, b"This account is disabled.\n", b""), "nothing was said"),
    ],
)
def test_a_shell_that_does_not_answer_is_a_host_error(tmp_path: Path, completed: Completed, says: str) -> None:
    with pytest.raises(HostError, match=says):
        session(tmp_path, Canned(completed)).script("true")


@pytest.mark.parametrize("text", ["echo nothing of ours", "echo 'Traceback: no module named json' >&2; exit 1", "kill -9 $$"])
def test_an_interpreter_that_answers_nonsense_is_one_sentence(tmp_path: Path, text: str) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)
    with pytest.raises(EnvironmentFault, match=f"{python} failed"):
        session(tmp_path, python=str(python)).call("runs", "list", {"root": str(tmp_path)})


def test_what_survives_sigkill_is_named_with_exit_code_11(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "quick-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"launch_id": "abc", "run": "quick-1"}')
    child = subprocess.Popen(["sleep", "600"], env={"DFLASHCTL_LAUNCH_ID": "abc", "PATH": os.environ["PATH"]})
    monkeypatch.setattr(onhost_stop, "_KILL_S", 0.1)
    monkeypatch.setattr(os, "kill", lambda *_: None)  # as a process in state D takes it
    record = RunRecord(launch_id="abc", host="local", place="p", tag="quick", created_at="", run="quick-1")

    class InThisProcess:
        host = session(tmp_path).host

        def call(self, _program, _verb, args, timeout_s):
            return onhost_stop.stop(args)

    try:
        with pytest.raises(StopIncompleteError, match=rf"pid {child.pid} \(sleep, state S\)") as caught:
            stop.stop(InThisProcess(), record, History(tmp_path, {"local": "p"}), grace_s=0.1)  # type: ignore[arg-type]
    finally:
        monkeypatch.undo()
        child.kill()
        child.wait(timeout=10)
    assert caught.value.exit_code == ExitCode.STOP_INCOMPLETE
