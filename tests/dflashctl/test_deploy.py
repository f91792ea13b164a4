"""`dflashctl deploy`: what lies on the host afterwards, and that whatever fails leaves the old release active."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


def active(bench) -> str | None:
    link = bench.root / "current"
    return link.readlink().name if link.is_symlink() else None


def test_deploy_sends_the_package_and_then_has_nothing_to_do(bench) -> None:
    bench.trainer("VALUE = 1", "sub/part.py")
    first = bench("deploy", "local", "--json").document
    assert first["files"] == 2
    assert first["previous"] is None
    assert sorted(first["changed"]) == ["trainer/__main__.py", "trainer/sub/part.py"]
    assert first["parse_check"]["files"] == 2
    assert first["parse_check"]["errors"] == []
    assert first["uploaded_bytes"] > 0
    assert active(bench) == first["release"]
    assert (bench.root / "current/trainer/sub/part.py").read_text() == "VALUE = 1"
    again = bench("deploy", "local")
    assert again.exit_code == 0
    assert "nothing to do" in again.stdout
    assert bench("deploy", "local", "--json").document["uploaded_bytes"] == 0


def test_a_removed_module_is_gone_on_the_host(bench) -> None:
    extra = bench.trainer("", "old.py")
    bench("deploy")
    extra.unlink()
    assert bench("deploy", "--json").document["changed"] == ["trainer/old.py"]
    assert not (bench.root / "current/trainer/old.py").exists()


def test_dry_run_changes_nothing(bench) -> None:
    done = bench("deploy", "local", "--dry-run")
    assert done.exit_code == 0
    assert "trainer/__main__.py" in done.stdout
    assert not bench.root.exists()


def test_what_is_not_source_stays_at_home(bench) -> None:
    for name in ("._main.py", "__pycache__/x.cpython-311.pyc", ".git/config", "notes.pyc"):
        bench.trainer("\0 not python", name)
    assert bench("deploy", "--json").document["files"] == 1


def test_a_file_that_does_not_parse_there_leaves_the_old_release_active(bench) -> None:
    good = bench("deploy", "--json").document["release"]
    bench.trainer("ok = 1\ndef broken(:\n", "bad.py")
    bench.trainer("x = 'no end\n", "worse.py")
    done = bench("deploy", "--json")
    assert done.exit_code == 8
    errors = done.document["parse_check"]["errors"]
    assert [e.split(" ")[0] for e in errors] == ["trainer/bad.py:2:", "trainer/worse.py:1:"]
    assert active(bench) == good
    text = bench("deploy").stderr
    assert "trainer/bad.py:2: " in text
    assert f"release {good} stays active" in text
    assert not list(bench.root.rglob("*.pyc"))
    assert sorted(p.name for p in (bench.root / "releases").iterdir()) == [good]


def test_a_release_damaged_on_the_host_is_noticed_and_replaced(bench) -> None:
    release = bench("deploy", "--json").document["release"]
    (bench.root / "releases" / release / "trainer/__main__.py").write_text("print('changed on the host')")
    (bench.root / "releases" / release / "trainer/stray.py").write_text("")
    done = bench("deploy", "--json").document
    assert done["uploaded_bytes"] > 0
    assert (bench.root / "current/trainer/__main__.py").read_text() == "print('hello from the trainer')"
    assert not (bench.root / "current/trainer/stray.py").exists()


def test_going_back_to_an_earlier_release_sends_nothing(bench) -> None:
    first = bench("deploy", "--json").document["release"]
    bench.trainer("print(2)")
    bench("deploy")
    bench.trainer("print('hello from the trainer')")
    back = bench("deploy", "--json").document
    assert back["release"] == first
    assert back["uploaded_bytes"] == 0
    assert active(bench) == first


def test_three_releases_are_kept_and_those_that_runs_name(bench) -> None:
    run = bench("launch", "--tag", "quick", "--startup-seconds", "20", "--json").document["release"]
    releases = [run]
    for number in range(5):
        bench.trainer(f"print({number})")
        releases.append(bench("deploy", "--json").document["release"])
    kept = {path.name for path in (bench.root / "releases").iterdir()}
    assert kept == {run, *releases[-3:]}


def test_full_root_leaves_the_old_release_active(bench, tmpfs: Callable[[str], Path]) -> None:
    root = tmpfs("size=256k")
    bench.hosts(f"hosts:\n  local: {{transport: local, root: {root}}}\ndefault: local\n")
    good = bench("deploy", "--json").document["release"]
    bench.trainer("x = '" + "y" * 400_000 + "'", "large.py")
    done = bench("deploy", "--json")
    assert done.exit_code == 8
    assert f"root {root} is full" in done.document["error"]["message"]
    assert (root / "current").readlink().name == good
    assert [p.name for p in (root / "releases").iterdir()] == [good]


def test_unwritable_root_is_one_sentence(bench, tmpfs: Callable[[str], Path]) -> None:
    root = tmpfs("ro")
    bench.hosts(f"hosts:\n  local: {{transport: local, root: {root}/dflash}}\ndefault: local\n")
    done = bench("deploy")
    assert done.exit_code == 8
    assert f"root {root}/dflash is read-only" in done.stderr


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        ("/no/such/python3", "has no interpreter at /no/such/python3"),
        ("/bin/true", "/bin/true failed: exit code 0, nothing was said"),
    ],
)
def test_an_interpreter_that_is_none(bench, python: str, sentence: str) -> None:
    bench.hosts(f"hosts:\n  local: {{transport: local, root: .dflash, python: {python}}}\ndefault: local\n")
    done = bench("deploy")
    assert done.exit_code == 8
    assert sentence in done.stderr


def test_names_with_spaces_and_quotes_arrive_unchanged(bench) -> None:
    root = bench.folder / "my \"runs\" $(1) 'ü'"
    bench.hosts("hosts:\n  local: {transport: local, root: " + json.dumps(str(root)) + "}\ndefault: local\n")
    bench.trainer("text = 'x'\n", "a file's $name.py")
    assert bench("deploy").exit_code == 0
    assert (root / "current/trainer/a file's $name.py").read_text() == "text = 'x'\n"


@pytest.mark.parametrize(("folder", "sentence"), [("nowhere", "must be a folder, got"), ("bin", "no __main__.py in it")])
def test_a_trainer_folder_that_is_none(bench, folder: str, sentence: str) -> None:
    bench.env["DFLASHCTL_TRAINER"] = str(bench.folder / folder)
    done = bench("deploy")
    assert done.exit_code == 3
    assert sentence in done.stderr
