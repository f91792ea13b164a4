"""Files to a host and back: whole, verified, resumed, and nowhere but where they belong."""

import json
import os
from pathlib import Path

import pytest

from dflashctl import transfer


@pytest.fixture
def data(bench) -> Path:
    folder = bench.folder / "chats (1)"
    (folder / "deep").mkdir(parents=True)
    (folder / "tokens.bin").write_bytes(os.urandom(3_000_000))
    (folder / "deep/ü 'x'.json").write_text("{}")
    (folder / "empty").touch()
    (folder / ".DS_Store").write_text("no")
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_arrives_whole_and_is_not_sent_again(bench, data: Path) -> None:
    done = bench("push", "local", "chats (1)", "data/chats", "--json")
    assert done.exit_code == 0, done.stderr
    expected = {name: content for name, content in tree(data).items() if name != ".DS_Store"}
    assert tree(bench.root / "data/chats") == expected
    assert done.document["files"] == 3
    assert done.document["bytes_moved"] == done.document["bytes_total"] == 3_000_002
    assert bench("push", "local", "chats (1)", "data/chats", "--json").document["bytes_moved"] == 0
    (data / "deep/ü 'x'.json").write_text("[1]")
    assert bench("push", "local", "chats (1)", "data/chats", "--json").document["bytes_moved"] == 3
    assert tree(bench.root / "data/chats")["deep/ü 'x'.json"] == b"[1]"
    assert not list((bench.root / "incoming").iterdir())


def test_one_file_under_its_own_name(bench) -> None:
    (bench.folder / "prompts.jsonl").write_text("x\n")
    assert bench("push", "local", "prompts.jsonl").exit_code == 0
    assert (bench.root / "prompts.jsonl").read_text() == "x\n"


@pytest.mark.parametrize("dest", ["runs/x", "releases", "../out", "/etc/x", ".", "current", "train_quick.log", "a/../../b"])
def test_no_place_of_ours_is_written(bench, data: Path, dest: str) -> None:
    done = bench("push", "local", "chats (1)", dest)
    assert done.exit_code == 8, done.stderr
    assert not bench.root.exists() or not list(bench.root.iterdir())


def test_a_file_does_not_take_a_folders_place(bench, data: Path) -> None:
    (bench.root / "data").mkdir(parents=True)
    done = bench("push", "local", "chats (1)/tokens.bin", "data")
    assert done.exit_code == 8
    assert "data is a folder: name the file that is to lie in it" in done.stderr
    assert not (bench.root / "incoming").exists()


def test_a_link_to_a_folder_is_refused_and_not_left_out(bench, data: Path) -> None:
    (data / "more").symlink_to(bench.folder)
    done = bench("push", "local", "chats (1)", "data/chats")
    assert (done.exit_code, "more is a link to a folder" in done.stderr) == (3, True)


def test_a_folder_named_as_one_that_a_run_keeps_is_sent(bench) -> None:
    (bench.folder / "data/cache").mkdir(parents=True)
    (bench.folder / "data/cache/x").write_text("1")
    assert bench("push", "local", "data", "data/chats").exit_code == 0
    assert tree(bench.root / "data/chats") == {"cache/x": b"1"}


def test_where_nothing_can_be_pulled_to_is_one_sentence(bench) -> None:
    assert bench("launch", "--tag", "quick", "--startup-seconds", "30").exit_code == 0
    (bench.folder / "taken").touch()
    done = bench("pull", "quick-1", "--into", "taken")
    assert (done.exit_code, "taken" in done.stderr, "fault of dflashctl" in done.stderr) == (8, True, False)


@pytest.mark.parametrize(("source", "says"), [("nothing", "neither a file nor a folder"), ("hollow", "holds no file")])
def test_a_source_that_is_none(bench, source: str, says: str) -> None:
    (bench.folder / "hollow").mkdir()
    done = bench("push", "local", source)
    assert (done.exit_code, says in done.stderr) == (3, True)


def test_a_full_disk_is_told_before_anything_is_sent(bench, data: Path, tmpfs) -> None:
    root = tmpfs("size=1m")
    bench.hosts(f"hosts: {{local: {{transport: local, root: '{root}'}}}}")
    done = bench("push", "local", "chats (1)", "data/chats")
    assert (done.exit_code, "MiB free" in done.stderr) == (8, True)
    assert list(root.iterdir()) == []


TRAINER = """
import os, pathlib
pathlib.Path("checkpoints/step-2").mkdir(parents=True)
pathlib.Path("checkpoints/step-2/model.safetensors").write_bytes(os.urandom(2_000_000))
os.symlink("step-2", "checkpoints/latest")
os.symlink("/etc/passwd", "checkpoints/evil")
pathlib.Path("cache").mkdir(exist_ok=True)
print("trained")
"""


@pytest.fixture
def trained(bench):
    bench.trainer(TRAINER)
    (bench.folder / ".env").write_text("TOKEN=hf_secret\n")
    assert bench("launch", "--tag", "quick", "--env-file", ".env", "--startup-seconds", "30").exit_code == 0
    return bench


def test_a_run_comes_home_without_its_secrets(trained) -> None:
    done = trained("pull", "quick-1", "--into", "home", "--json")
    assert done.exit_code == 0, done.stderr
    here, there = trained.folder / "home/quick-1", trained.run_folder("quick-1")
    model = "checkpoints/step-2/model.safetensors"
    assert (here / model).read_bytes() == (there / model).read_bytes()
    assert (here / "train.log").read_text() == "trained\n"
    assert os.readlink(here / "checkpoints/latest") == "step-2"
    assert not (here / "checkpoints/evil").exists()
    assert not (here / "secrets.sh").exists()
    assert b"hf_secret" not in b"".join(tree(here).values())
    assert trained("pull", "quick-1", "--into", "home", "--json").document["bytes_moved"] == 0


def test_a_part_of_a_run(trained) -> None:
    assert trained("pull", "quick-1", "checkpoints/latest").exit_code == 0
    assert [path.name for path in (trained.folder / "quick-1/checkpoints/step-2").iterdir()] == ["model.safetensors"]
    for path in ("nothing", "../quick-1", "/etc", "secrets.sh", "checkpoints/evil"):
        done = trained("pull", "quick-1", path)
        assert done.exit_code in (8, 10), path
    assert [path.name for path in (trained.folder / "quick-1").iterdir()] == ["checkpoints"]


def test_a_broken_pull_goes_on_where_it_stopped(trained) -> None:
    model = trained.folder / "quick-1/checkpoints/step-2/model.safetensors"
    there = (trained.run_folder("quick-1") / "checkpoints/step-2/model.safetensors").read_bytes()
    model.parent.mkdir(parents=True)
    part = model.with_name(".model.safetensors.partial")
    part.write_bytes(there[:1_500_000])
    done = trained("pull", "quick-1", "checkpoints", "--json")
    assert done.document["bytes_moved"] == 500_000
    assert model.read_bytes() == there
    model.unlink()
    part.write_bytes(b"x" * 1_500_000)
    assert trained("pull", "quick-1", "checkpoints").exit_code == 8  # what lay there was something else
    assert trained("pull", "quick-1", "checkpoints").exit_code == 0
    assert model.read_bytes() == there


class Host:
    """A host that answers what it is told to."""

    name = "box"
    root = "/workspace"


class Session:
    host = Host()
    round_trips = 9

    def __init__(self, listing: dict) -> None:
        self._listing = {"links": [], "real": ".", **listing}

    def call(self, program, verb, args, payload=b"", timeout_s=0.0):
        return self._listing if verb == "listing" else {"data": "eA=="}


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "a\\..\\evil", "nul\0"])
def test_a_host_names_no_file_outside(tmp_path: Path, name: str) -> None:
    record = transfer.RunRecord(launch_id="a", host="box", place="p", tag="t", created_at="c", run="quick-1")
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of "x"
    evil = {"files": [{"path": name, "size": 1, "sha256": digest}]}
    with pytest.raises(transfer.EnvironmentFault, match="outside its run"):
        transfer.pull(Session(evil), record, ".", tmp_path / "in", lambda *_: None)
    with pytest.raises(transfer.EnvironmentFault, match="outside its run"):
        transfer.pull(Session({"files": [], "real": name}), record, ".", tmp_path / "in", lambda *_: None)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_link_that_is_here_leads_no_file_outside(tmp_path: Path) -> None:
    record = transfer.RunRecord(launch_id="a", host="box", place="p", tag="t", created_at="c", run="quick-1")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "in/quick-1").mkdir(parents=True)
    (tmp_path / "in/quick-1/sub").symlink_to(outside)
    evil = {"files": [{"path": "sub/x", "size": 1, "sha256": json.dumps(None)}]}
    with pytest.raises(transfer.EnvironmentFault, match="leads out of"):
        transfer.pull(Session(evil), record, ".", tmp_path / "in", lambda *_: None)
    assert list(outside.iterdir()) == []
