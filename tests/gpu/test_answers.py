"""The target's answers on a GPU, many at once in captured steps, are those that it gives on the CPU."""

import json

import pytest
import tiny
import transformers

from trainer import prepare

pytestmark = pytest.mark.gpu

TEMPLATE = """\
{% for m in messages %}{% if m.role == 'assistant' %} w8 {{ m.content }} </s>\
{% else %} w7 {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} w8 {% endif %}"""


def test_answers_on_a_gpu_are_the_cpus(tmp_path):
    tiny.make(tmp_path)
    config = json.loads((tmp_path / "target/config.json").read_text())
    (tmp_path / "target/config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "target")
    turns = [[f"w{i} w{i + 9}", f"w{i + 3}"][: 1 + i % 2] for i in range(40)]
    chats = [{"messages": [{"role": "user", "content": text} for text in texts]} for texts in turns]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    told = []
    for device in ("cpu", "cuda:0"):
        given = [
            "--input",
            str(tmp_path / "chats.jsonl"),
            "--output",
            str(tmp_path / device),
            "--target",
            str(tmp_path / "target"),
        ]
        how = ["--regenerate", "--device", device, "--dtype", "float32", "--rows", "16", "--max-tokens", "600"]
        assert prepare.main([*given, *how, "--max-new-tokens", "500"]) == 0  # more than one graph's keys
        lines = (tmp_path / f"{device}.regenerated.jsonl").read_text().splitlines()[1:]
        told.append({line["index"]: line for line in map(json.loads, lines)})
    assert told[0] == told[1]
    assert any(line["messages"] for line in told[0].values())
