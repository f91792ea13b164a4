"""`dflashctl tail`: logs that are huge, rotated, endless, broken or hostile, into pipes, terminals and programs."""

import base64
import io
import json
import os
import pty
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest

from dflashctl.onhost import logs
from dflashctl.onhost.layout import RunFolder
from dflashctl.render import LogStream, Renderer
from dflashctl.watch import BEGIN

FOLLOWED = """
    import os, pathlib, time
    log = pathlib.Path("train.log")
    def say(text):
        print(text, flush=True)
    say("up")
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
"""


def finished(bench, log: bytes) -> Path:
    """An ended run whose log is `log`; the path of that."""
    bench("launch", "--tag", "quick", "--startup-seconds", "30")
    path = bench.run_folder("quick-1") / "train.log"
    path.write_bytes(log)
    return path


def launched(bench, script: str = FOLLOWED) -> Path:
    """The folder of a living run."""
    bench.trainer(script)
    assert bench("launch", "--tag", "quick", "--startup-seconds", "0.3").exit_code == 0
    return bench.run_folder("quick-1")


def on_terminal(bench, *args: str, term: str = "xterm", columns: int = 80) -> str:
    """What one command writes to a terminal, with its line ends as they are elsewhere."""
    ours, theirs = pty.openpty()
    env = bench.env | {"TERM": term, "COLUMNS": str(columns)}
    with subprocess.Popen(
        [bench.executable, *args], cwd=bench.folder, env=env, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.DEVNULL
    ) as process:
        os.close(theirs)
        text = b""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # what a terminal says once nobody has it open
                break
            text += data
        process.wait(timeout=60)
    os.close(ours)
    return text.decode().replace("\r\n", "\n")


class Log:
    """Looks at a log in this process, as `tail` does on a host."""

    def __init__(self, root: Path, lines: int | None = None) -> None:
        self.folder = RunFolder(root / "runs/quick-1")
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.root, self.lines, self.place = root, lines or 0, BEGIN if lines is None else None
        self.restarts = 0

    def look(self) -> bytes:
        request = {"root": str(self.root), "run": "quick-1", "launch_id": "", "place": self.place, "lines": self.lines}
        answer = logs.peek(request | {"wait_s": 0})
        self.place = answer["place"]
        self.restarts += answer["restarted"]
        return base64.b64decode(answer["data"])

    def rest(self) -> bytes:
        found = b""
        while data := self.look():
            found += data
        return found


def test_where_the_last_lines_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "BLOCK_BYTES", 24)
    draw = random.Random(5)
    path = tmp_path / "log"
    for _ in range(200):
        lines = [b"x" * draw.randrange(8) + draw.choice((b"\n", b"\r", b"\r\n")) for _ in range(draw.randrange(12))]
        text = re.sub(rb"\r\n?\n", b"\r\n", b"".join(lines)) + b"y" * draw.randrange(3)
        path.write_bytes(text)
        whole = re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+", text)
        for count in (0, 1, 2, 5, 11, 99):
            assert text[logs.line_start(path, count) :] == b"".join(whole[-count:] if count else []), (text, count)


def test_a_log_of_5_gb_is_not_read_whole(bench) -> None:
    path = finished(bench, b"")
    os.truncate(path, 5 << 30)
    with path.open("ab") as file:
        file.write(b"\n" + b"".join(b"line %d\n" % i for i in range(100)))
    log = Log(bench.root, lines=20)
    before = _bytes_read()
    assert log.rest() == b"".join(b"line %d\n" % i for i in range(80, 100))
    with path.open("ab") as file:
        file.write(b"one more\n")
    assert log.rest() == b"one more\n"
    assert _bytes_read() - before < 3 << 20
    assert bench("tail", "-n", "2").stdout == "line 99\none more\n"
    os.truncate(path, 5 << 30)  # one line without an end
    assert len(bench("tail", "-n", "5").stdout) == 1 << 20


def _bytes_read() -> int:
    counters = Path("/proc/self/io").read_text()
    return int(counters.split()[counters.split().index("rchar:") + 1])


def test_10_mb_of_progress(bench) -> None:
    bar = b"".join(b"\r%7d of 500000 steps" % i for i in range(500_000))
    path = finished(bench, b"begin\n" + bar)
    last = b"".join(b"%7d of 500000 steps\r" % i for i in range(499_995, 500_000))[:-1].decode()
    before = _bytes_read()
    assert Log(bench.root, lines=5).rest().decode() == last
    assert _bytes_read() - before < 3 << 20
    assert on_terminal(bench, "tail", "-n", "5") == last
    path.write_bytes(b"\r" * 10_000_000 + b"the last state")
    assert Log(bench.root, lines=1).rest() == b"the last state"


def test_a_cut_line_begins_with_a_whole_character(tmp_path: Path) -> None:
    log = Log(tmp_path, lines=1)
    log.folder.log.write_bytes(b"x" + "€".encode() * 1_000_000)
    text = log.rest().decode()
    assert set(text) == {"€"}
    assert (1 << 20) - 3 <= len(text.encode()) <= 1 << 20


def _renamed(log: Path) -> None:
    log.rename(f"{log}.1")


def _renamed_twice(log: Path) -> None:
    log.with_name("train.log.1").rename(log.with_name("train.log.2"))
    log.rename(f"{log}.1")


def _copied_and_truncated(log: Path) -> None:
    log.with_name("train.log-20260101").write_bytes(log.read_bytes())
    os.truncate(log, 0)


@pytest.mark.parametrize("rotate", [_renamed, _renamed_twice, _copied_and_truncated])
@pytest.mark.parametrize("more", [b"", b"few\n", b"much\n" * 5000])
def test_rotation_loses_nothing_and_repeats_nothing(tmp_path: Path, rotate, more: bytes) -> None:
    log = Log(tmp_path)
    path = log.folder.log
    Path(f"{path}.1").write_bytes(b"of an earlier rotation\n")
    path.write_bytes(b"seen\n" * 2000)
    assert log.rest() == b"seen\n" * 2000
    with path.open("ab") as file:
        file.write(b"not yet seen\n")
    rotate(path)
    path.write_bytes(more)
    assert log.rest() == b"not yet seen\n" + more
    with path.open("ab") as file:
        file.write(b"end\n")
    assert log.rest() == b"end\n"
    assert log.restarts == 0


def test_several_rotations_between_two_looks_lose_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path)
    path = log.folder.log
    path.write_bytes(b"first\n" * 2000)
    assert log.rest() == b"first\n" * 2000
    for number, text in enumerate((b"second\n", b"third\n", b"fourth\n")):
        for old in range(number, 0, -1):
            path.with_name(f"train.log.{old}").rename(path.with_name(f"train.log.{old + 1}"))
        path.rename(path.with_name("train.log.1"))
        path.write_bytes(text)
    assert log.rest() == b"second\nthird\nfourth\n"
    assert log.restarts == 0


def test_a_rotation_in_the_middle_of_a_look_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path)
    path = log.folder.log
    path.write_bytes(b"first\n")
    piece = logs._piece

    def rotated_behind_it(*args: object, **more: object) -> tuple[bytes, int]:
        found = piece(*args, **more)
        monkeypatch.setattr(logs, "_piece", piece)
        with path.open("ab") as running:
            path.rename(path.with_name("train.log.1"))
            running.write(b"unseen\n")
        path.touch()
        return found

    monkeypatch.setattr(logs, "_piece", rotated_behind_it)
    assert log.rest() == b"first\nunseen\n"
    path.write_bytes(b"third\n")
    assert log.rest() == b"third\n"
    assert log.restarts == 0


@pytest.mark.parametrize("more", [b"few\n", b"much\n" * 5000, b"seen\n" * 1999 + b"else\n" * 2])
def test_a_log_truncated_in_place_is_shown_from_its_start(tmp_path: Path, more: bytes) -> None:
    log = Log(tmp_path)
    log.folder.log.write_bytes(b"seen\n" * 2000)
    log.rest()
    log.folder.log.write_bytes(more)
    assert log.rest() == more
    assert log.restarts == 1


def test_a_backup_of_the_log_or_a_file_beside_it_is_not_the_log(tmp_path: Path) -> None:
    log = Log(tmp_path)
    path = log.folder.log
    path.write_bytes(b"seen\n")
    log.rest()
    for name in ("train.log.1", "train.log.notes", "train.log~"):
        path.with_name(name).write_bytes(b"seen\nsomething else\n")
    assert log.rest() == b""
    path.write_bytes(b"")
    path.with_name("train.log.1").unlink()
    assert Log(tmp_path, lines=5).rest() == b""


def test_the_last_lines_of_a_log_that_was_just_rotated(tmp_path: Path) -> None:
    log = Log(tmp_path, lines=2)
    log.folder.path.joinpath("train.log.1").write_bytes(b"a\nb\nc\n")
    log.folder.log.touch()
    assert log.look() == b"b\nc\n"
    log.folder.log.write_bytes(b"d\n")
    assert log.rest() == b"d\n"


@pytest.mark.parametrize(
    ("rotate", "shown", "note"),
    [
        ("log.rename('train.log.1'); log.touch()", {"unseen\nafter\n"}, ""),
        # nobody can tell whether a look came between the two
        ("os.truncate(log, 0)", {"after\n", "unseen\nafter\n"}, "cut off or replaced"),
    ],
)
def test_rotation_under_a_running_tail(bench, rotate: str, shown: set[str], note: str) -> None:
    folder = launched(bench, f"{FOLLOWED}\n    print('unseen', flush=True); {rotate}; say('after')\n")
    with bench.start("tail") as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        (folder / "go").touch()
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert stdout.decode() in shown
    assert note in stderr.decode()


HOSTILE = (
    "[red]x[/red] [/] :smile: %s {0} \\x1b \x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b(B\x1bP1;2q\x1b\\ \x9b2J\x08\x00 grün €"
).encode()
HARMLESS = "[red]x[/red] [/] :smile: %s {0} \\x1b red    grün €"


def test_a_terminal_gets_no_control_sequences_and_a_pipe_every_byte(bench) -> None:
    path = finished(bench, HOSTILE + b" \xff\xfe \xe2\x82\n" + HOSTILE + b"\xf0\x9f")
    assert on_terminal(bench, "tail") == f"{HARMLESS} �� �\n{HARMLESS}�"
    with bench.start("tail") as process:
        assert process.stdout
        assert process.stdout.read() == path.read_bytes()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_chunk_may_end_anywhere() -> None:
    data = HOSTILE + b"\xff\xe2\x82\n\x1b]never ended\nnext \x1b[38;5;1" + b"2mline\x1b"
    texts = set()
    for at in range(len(data) + 1):
        out = Terminal()
        stream = LogStream(out)
        stream.feed(data[:at])
        stream.feed(data[at:])
        stream.end()
        texts.add(out.getvalue())
    (text,) = texts
    assert text.endswith("�\n\nnext line")


def test_json_is_a_document_for_each_line_and_one_for_the_end(bench) -> None:
    finished(bench, b"before\na\r\n" + "grün".encode() + b"\rhalf \xe2\x82\n\nend")
    for more in ((), ("--no-follow",)):
        documents = [json.loads(line) for line in bench("tail", "-n", "5", "--json", *more).stdout.splitlines()]
        assert documents[:-1] == [{"schema": 1, "line": line} for line in ("a", "grün", "half �", "", "end")]
        last = documents[-1]
        assert (last["schema"], last["run"], last["state"], last["exit_code"]) == (1, "quick-1", "exited", 0)


def test_json_cuts_a_line_without_an_end_and_no_line_end_in_two(capsys: pytest.CaptureFixture[str]) -> None:
    log = Renderer(as_json=True).log(as_documents=True)
    for data in (b"a\r", b"\nb", b"\r", b"c" * 1_500_000, b"c" * 1_500_000, b"\nend"):
        log.feed(data)
    log.end()
    lines = [json.loads(line)["line"] for line in capsys.readouterr().out.splitlines()]
    assert (lines[:2], lines[-1]) == (["a", "b"], "end")
    assert [len(line) for line in lines[2:-1]] == [1 << 20, 1 << 20, 3_000_000 - (2 << 20)]


def test_json_of_a_living_run_ends_with_a_document_also_at_ctrl_c(bench) -> None:
    launched(bench)
    with bench.start("tail", "--json") as process:
        assert process.stdout
        assert json.loads(process.stdout.readline()) == {"schema": 1, "line": "up"}
        os.killpg(process.pid, signal.SIGINT)
        stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(stdout)["error"]["code"] == "interrupted"


def test_a_reader_that_left_ends_a_tail_of_a_silent_run(bench) -> None:
    launched(bench)
    with bench.start("tail") as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr
        assert b"Traceback" not in process.stderr.read()


def test_a_run_that_is_killed_whole_ends_its_tail(bench) -> None:
    launched(bench)
    with bench.start("tail") as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        wrapper = bench("status", "--json").document["pid"]
        for pid in [wrapper, *bench.marked("quick-1")]:  # in this order: the wrapper writes down how its trainer ends
            os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"lost" in stderr


def test_a_death_in_the_window_shows_a_huge_line_short(bench) -> None:
    bench.trainer("import sys; sys.stdout.write('x' * 3_000_000); sys.exit('the cause')")
    done = bench("launch", "--tag", "quick", "--startup-seconds", "60")
    assert done.exit_code == 9
    assert "the cause" in done.stderr
    assert len(done.stderr) < 5000


def test_names_are_whole_in_pipes_and_on_every_terminal(bench) -> None:
    tag = "a-tag-of-" + "many-words-" * 4 + "z"
    bench.experiment(tag)
    bench("launch", "--tag", tag, "--startup-seconds", "30")
    assert f"{tag}-1\t" in bench("runs").stdout
    assert f"{tag}-1\t" in on_terminal(bench, "runs", term="dumb", columns=40)
    assert f"{tag}-1 " in on_terminal(bench, "runs", columns=40)


def test_show_says_on_a_terminal_of_each_value_where_it_came_from(bench) -> None:
    path = bench.experiment("long")
    path.write_text(path.read_text().replace("hypothesis: ", "hypothesis: " + "many words that say why " * 20))
    shown = on_terminal(bench, "show", "long", "--set", "optim.lr_warmup_steps=7")
    lines = re.sub("\x1b[^m]*m", "", shown).splitlines()
    (line,) = [line for line in lines if line.startswith("optim.lr_warmup_steps ")]
    assert line.split() == ["optim.lr_warmup_steps", "7", "--set"]
    assert not [line for line in lines if "…" in line or len(line) > 80]
