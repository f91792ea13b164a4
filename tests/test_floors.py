"""Each half imports where the other half's packages are not installed."""

import subprocess
import sys

import pytest

IMPORT_ALL = """
import builtins, importlib, pkgutil, sys

real_import = builtins.__import__
refused = {blocked!r}

def guarded_import(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or dict()).get("__name__", "")
    ours = importer.partition(".")[0] in ("dflashctl", "trainer")
    if ours and not level and name.partition(".")[0] in refused:
        raise ModuleNotFoundError(f"{{importer}} must not import {{name}}")
    return real_import(name, globals, locals, fromlist, level)

builtins.__import__ = guarded_import
for package in {packages!r}:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), package + "."):
        importlib.import_module(found.name)
        print(found.name)
print("loaded:", *sorted({{name.partition(".")[0] for name in sys.modules}} & set(refused)))
"""

TRAINERS = ["torch", "transformers", "safetensors", "numpy", "gguf", "accelerate"]
COMMAND_LINES = ["typer", "click", "fabric", "paramiko", "invoke", "rich", "yaml", "dflashctl"]


def import_all(packages: list[str], blocked: list[str]) -> tuple[list[str], list[str]]:
    """Imports all modules of `packages` in a fresh interpreter; returns them, and which of `blocked` got loaded by others."""
    program = IMPORT_ALL.format(packages=packages, blocked=blocked)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    *modules, loaded = done.stdout.splitlines()
    return modules, loaded.split()[1:]


def test_the_command_line_needs_nothing_of_the_trainers() -> None:
    modules, loaded = import_all(["dflashctl"], TRAINERS)
    assert "dflashctl.experiment" in modules
    assert loaded == []


def test_the_contract_needs_nothing_at_all() -> None:
    modules, loaded = import_all(["trainer.config", "trainer.events", "trainer.errors"], TRAINERS + COMMAND_LINES)
    assert (modules, loaded) == ([], [])


def test_the_trainer_needs_nothing_of_the_command_lines() -> None:
    modules, loaded = import_all(["trainer"], COMMAND_LINES)
    assert "trainer.config" in modules
    # transformers brings a few of them for itself; those that reach out to hosts never
    assert not {"fabric", "paramiko", "invoke", "dflashctl"} & set(loaded)


@pytest.mark.parametrize("package", ["yaml", "torch"])
def test_the_guard_bites(package: str) -> None:
    program = IMPORT_ALL.format(packages=["dflashctl.strict_yaml" if package == "yaml" else "trainer.batch"], blocked=[package])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    assert f"must not import {package}" in done.stderr
