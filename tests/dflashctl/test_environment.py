"""`dflashctl setup`: an environment under root from wheels in a folder, and the fingerprint that each run keeps."""

import fcntl
import json
import shutil
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from dflashctl.environment import PINS, requirements
from dflashctl.onhost import environment as on_host
from dflashctl.onhost.doctor import satisfies
from dflashctl.onhost.entry import Fault

SLEEPER = "import torch, time; print('torch', torch.__version__, flush=True); time.sleep(600)"


def wheel(folder: Path, name: str, version: str) -> None:
    """The smallest wheel that pip installs."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"__version__ = '{version}'\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def shop(bench):
    """A host whose pip knows no index but a folder of wheels."""
    folder = bench.folder / "wheels"
    folder.mkdir()
    for name, version in PINS.items():
        wheel(folder, name, version)
    hosts(bench)
    return bench


def pip_env(bench) -> dict[str, str]:
    names = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{bench.folder}/wheels", "PIP_CONSTRAINT": ""}
    return names | {"PIP_CONFIG_FILE": "/dev/null", "PIP_EXTRA_INDEX_URL": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def hosts(bench, python: str = sys.executable) -> None:
    keys = f"transport: local, root: .dflash, python: '{python}', env: {json.dumps(pip_env(bench))}"
    bench.hosts(f"default: local\nhosts:\n  local: {{{keys}}}\n")


def fake_uv(bench) -> Path:
    """uv's two commands over pip; the log of what was asked of it."""
    log = bench.folder / "uv.log"
    program = bench.folder / "bin/uv"
    program.write_text(
        f"""#!/bin/sh
        echo "$1" >>{log}
        case "$1" in
        venv) exec "$3" -m venv --without-pip "$4" ;;
        pip) python=$4; shift 4; exec {sys.executable} -m pip --python "$python" install "$@" ;;
        esac
        """
    )
    program.chmod(0o755)
    return log


def made(done) -> dict[str, object]:
    assert done.exit_code == 0, done.stdout + done.stderr
    (host,) = done.document["hosts"]
    return host


def test_the_whole_way_from_nothing_to_a_run_that_keeps_its_fingerprint(shop, monkeypatch: pytest.MonkeyPatch) -> None:
    python = f"{shop.root}/venv/bin/python"
    first = made(shop("setup", "--json"))
    assert (first["python"], first["made"], first["tool"], first["is_named"]) == (python, True, "pip", False)
    assert first["packages"] == PINS
    hosts(shop, python)
    again = shop("setup")
    assert again.exit_code == 0
    assert again.stdout.startswith(f"{python}: nothing to do; torch {PINS['torch']}, ")
    assert "set hosts." not in again.stdout

    shop.trainer(SLEEPER)
    assert shop("launch", "--tag", "quick", "--startup-seconds", "0.5").exit_code == 0
    folder = shop.run_folder("quick-1")
    record = json.loads((folder / "run.json").read_text())
    shop.until(lambda: (folder / "train.log").read_text() == f"torch {PINS['torch']}\n")
    assert record["environment"]["fingerprint"] == first["fingerprint"]
    assert record["environment"]["packages"]["torch"] == PINS["torch"]
    assert record["environment"]["driver"] is None
    assert record["python"].startswith(f"{shop.root}/venvs/")

    # a newer environment takes over, and the floor of a run that was launched while it was made stays
    assert shop("stop", "quick-1").exit_code == 0
    fake_uv(shop)

    def meanwhile(*args) -> None:
        assert shop("launch", "--tag", "quick", "--startup-seconds", "0.5").exit_code == 0
        build(*args)

    build = on_host._build
    monkeypatch.setattr(on_host, "_build", meanwhile)
    monkeypatch.setenv("PATH", shop.env["PATH"])
    wheel(shop.folder / "wheels", "torch", "9.0")
    request = {
        "root": str(shop.root),
        "base": sys.executable,
        "env": pip_env(shop),
        "pins": [f"{name}=={version}" for name, version in (PINS | {"torch": "9.0"}).items()],
    }
    newer = on_host.setup(request)
    assert (newer["packages"]["torch"], newer["pruned"]) == ("9.0", [])
    assert newer["fingerprint"] != first["fingerprint"]
    assert Path(record["python"]).exists()
    assert shop("stop", "quick-2").exit_code == 0
    assert on_host.setup(request)["pruned"] == [Path(record["python"]).parts[-3]]
    assert not Path(record["python"]).exists()

    # what somebody installs by hand is noticed
    site = next(Path(python).parent.parent.glob("lib/*/site-packages"))
    shutil.copytree(site / "gguf-0.19.0.dist-info", site / "intruder-1.0.dist-info")
    (site / "intruder-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: intruder\nVersion: 1.0\n")
    now = on_host.look(python, {})
    assert on_host.changed(python, now) == ["intruder was not there, is 1.0"]


def test_a_setup_that_fails_leaves_what_was_there(shop) -> None:
    fake_uv(shop)
    for path in (shop.folder / "wheels").glob("transformers-*"):
        path.unlink()
    done = shop("setup", "--json")
    assert done.exit_code == 8
    error = done.document["hosts"][0]["error"]
    assert "No matching distribution found for transformers==" in error["message"]
    assert str(shop.root / "venvs/setup.log") in error["hint"]
    assert not (shop.root / "venv").exists()
    assert [path.name for path in (shop.root / "venvs").iterdir() if path.is_dir()] == []


def test_uv_is_taken_where_it_is(shop) -> None:
    log = fake_uv(shop)
    assert made(shop("setup", "--json"))["tool"] == "uv"
    assert log.read_text() == "venv\npip\n"


def test_two_setups_at_once_and_no_python(shop) -> None:
    place = shop.root / "venvs"
    place.mkdir(parents=True)
    with (place / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = shop("setup", "--json")
    assert done.exit_code == 124
    assert "another setup is under way" in done.document["hosts"][0]["error"]["message"]
    with pytest.raises(Fault, match="cannot look up its packages"):
        on_host.look("/bin/false", {})


def test_the_pins_are_what_the_trainer_takes_and_what_make_installs() -> None:
    wanted = requirements()
    assert wanted.keys() == PINS.keys()
    assert {name: version for name, version in PINS.items() if not satisfies(version, wanted[name])} == {}
    makefile = Path(__file__).parents[2].joinpath("Makefile").read_text()
    assert f"torch=={PINS['torch']}\n" in makefile
    assert metadata.version("torch").split("+")[0] == PINS["torch"]
