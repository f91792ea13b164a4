"""What stands in --env-file reaches the run and nobody else."""

import json
import stat

import pytest

SECRET = "hf_$(date)_'q\"\\u00fc"
TRAINER = """
import os, sys, time
value = os.environ["HF_TOKEN"]
print("token", value, flush=True)
print("on", os.environ["MODE"], flush=True)
"""


@pytest.fixture
def secret(bench):
    (bench.folder / ".env").write_text(f"# mine\n\nexport HF_TOKEN={SECRET}\nMODE='1'\n")
    bench.trainer(TRAINER)
    return bench


def test_the_value_arrives_and_is_shown_nowhere(secret) -> None:
    done = secret("launch", "--tag", "quick", "--env-file", ".env", "--startup-seconds", "30", "--json")
    assert done.exit_code == 0, done.stderr
    folder = secret.run_folder("quick-1")
    assert f"token {SECRET}\n" in (folder / "train.log").read_text()
    shown = [
        done,
        secret("tail", "quick-1"),
        secret("tail", "quick-1", "--no-follow", "--json"),
        secret("status", "quick-1", "--json"),
        secret("runs", "--refresh", "--json"),
    ]
    for each in shown:
        assert SECRET not in each.stdout + each.stderr
        assert "hf_" not in each.stdout + each.stderr
    assert "token ***\non 1\n" in shown[1].stdout
    assert json.loads((folder / "run.json").read_text())["env_file"] == ["HF_TOKEN", "MODE"]
    readable = [path for path in [*secret.root.rglob("*"), *(secret.folder / "state").rglob("*")] if path.is_file()]
    assert {path.name for path in readable if SECRET in path.read_text(errors="replace")} == {"train.log", "train_quick.log"}
    assert stat.S_IMODE((folder / "secrets.sh").stat().st_mode) == 0o600


def test_a_death_at_start_shows_the_log_without_the_value(secret) -> None:
    event = "{'event': 'failed', 'error': f'bad token {value}'}"
    secret.trainer(f"import json\n{TRAINER}\nopen('events.jsonl', 'w').write(json.dumps({event}))\nsys.exit(value)")
    (secret.folder / ".env").write_text("HF_TOKEN=hf_abcdef\nMODE=1\n")
    done = secret("launch", "--tag", "quick", "--env-file", ".env", "--startup-seconds", "30")
    assert done.exit_code == 9
    assert "token ***" in done.stderr
    assert "hf_" not in done.stderr
    status = secret("status", "quick-1", "--json")
    assert status.document["error"] == "bad token ***"


def test_a_value_that_spans_two_pieces_of_a_log_is_masked(secret) -> None:
    (secret.folder / ".env").write_text("HF_TOKEN=hf_abcdefghij\nMODE=1\n")
    secret.trainer(
        """
        import os
        for number in range(60_000):
            print(f"{number:07d}", "x" * (number % 7), os.environ["HF_TOKEN"])
        """
    )
    done = secret("launch", "--tag", "quick", "--env-file", ".env", "--startup-seconds", "60")
    assert done.exit_code == 0
    shown = secret("tail", "quick-1", "-n", "60000").stdout
    assert shown.count("***") == 60_000
    assert "hf_" not in shown


def test_no_command_line_ever_holds_it(secret) -> None:
    """Whatever runs on this machine while a launch is under way."""
    (secret.folder / ".env").write_text("HF_TOKEN=hf_abcdefghij\nMODE=1\n")
    secret.trainer(
        """
        import contextlib, pathlib
        lines = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it may have ended
                lines.append(path.read_bytes())
        seen = any(b"hf_abcdefghij" in line for line in lines)
        print("seen" if seen else "unseen" if len(lines) > 1 else "nothing to see")
        """
    )
    assert secret("launch", "--tag", "quick", "--env-file", ".env", "--startup-seconds", "30").exit_code == 0
    assert secret("tail", "quick-1").stdout == "unseen\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("HF TOKEN=hf_abc\n", ".env:1 must be NAME=VALUE"),
        ("\nhf_abcdef\n", ".env:2 must be NAME=VALUE"),
        ("CUDA_VISIBLE_DEVICES=0\n", ".env:1: CUDA_VISIBLE_DEVICES is set by launch"),
        ("DFLASHCTL_LAUNCH_ID=ab\n", ".env:1: DFLASHCTL_LAUNCH_ID is what launch gives each run"),
        ("PYTHONPATH=.\n", ".env:1: PYTHONPATH is what launch gives each run"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_line_is_named_and_not_shown(bench, text: str | None, says: str) -> None:
    if text is not None:
        (bench.folder / ".env").write_text(text)
    done = bench("launch", "--tag", "quick", "--env-file", ".env")
    assert done.exit_code == 3
    assert says in done.stderr
    assert "hf_" not in done.stderr
    assert not bench.root.exists()


def test_a_value_that_is_a_word_of_json_hides_no_verdict(secret) -> None:
    (secret.folder / ".env").write_text("WANDB_DISABLED=true\nHF_TOKEN=hf_abcdef\nMODE=1\n")
    secret.trainer(
        """
        import json, os
        print("token", os.environ["HF_TOKEN"])
        print(json.dumps({"go": True, "reasons": [os.environ["HF_TOKEN"]]}))
        """,
        "smoke.py",
    )
    done = secret("smoke", "--tag", "quick", "--env-file", ".env", "--json")
    assert done.exit_code == 0, done.stderr
    assert done.document["go"] is True
    assert done.document["reasons"] == ["***"]


@pytest.mark.parametrize("end", ["\\n", "\\r", " "], ids=["lines", "progress", "one line"])
def test_a_value_is_never_shown_in_two_halves(secret, end: str) -> None:
    (secret.folder / ".env").write_text("HF_TOKEN=hf_abcdefghij\nMODE=1\n")
    secret.trainer(
        f"""
        import os
        for number in range(60_000):
            print(f"{{number:07d}}", "x" * (number % 7), os.environ["HF_TOKEN"], end="{end}")
        """
    )
    assert secret("launch", "--tag", "quick", "--env-file", ".env", "--startup-seconds", "60").exit_code == 0
    for lines in ("60000", "100"):
        shown = secret("tail", "quick-1", "-n", lines).stdout
        assert "***" in shown
        assert "hf_a" not in shown
        assert not [word for word in shown.split() if word not in ("***",) and set(word) & set("abcdefghij_")]


def test_a_line_that_comes_in_two_parts_is_masked_while_it_is_followed(secret) -> None:
    (secret.folder / ".env").write_text("HF_TOKEN=hf_abcdefghij\nMODE=1\n")
    secret.trainer(
        """
        import os, pathlib, time
        token = os.environ["HF_TOKEN"]
        print("token", token[:6], end="", flush=True)
        while not pathlib.Path("go").exists():
            time.sleep(0.05)
        print(token[6:], "done")
        """
    )
    assert secret("launch", "--tag", "quick", "--env-file", ".env", "--startup-seconds", "0").exit_code == 0
    following = secret.start("tail", "quick-1")
    secret.until(lambda: (secret.run_folder("quick-1") / "train.log").read_text() == "token hf_abc")
    assert "hf_" not in secret("tail", "quick-1", "--no-follow").stdout
    (secret.run_folder("quick-1") / "go").touch()
    stdout, _ = following.communicate(timeout=60)
    assert stdout == b"token *** done\n"


def test_escaped_forms_are_masked_too(secret) -> None:
    secret.trainer(
        """
        import json, os
        token = os.environ["HF_TOKEN"]
        print(json.dumps({"token": token}), repr(token), {"token": token})
        """
    )
    assert secret("launch", "--tag", "quick", "--env-file", ".env", "--startup-seconds", "30").exit_code == 0
    shown = secret("tail", "quick-1").stdout
    assert shown.count("***") == 3
    assert "hf_" not in shown
