"""Values that would spoil the work are refused in one sentence, and what is left of nothing is told as it is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from trainer import evaluate, prepare
from trainer.errors import DataError
from trainer.evaluate import read_prompts

ALLOWED = "must be 0 or a finite number of at least 0.001, got "


@pytest.mark.parametrize("value", ["nan", "inf", "1e-320", "0.0009", "-1"])
def test_a_temperature_is_finite_and_not_next_to_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    for command in (
        [evaluate.main, "--checkpoint", "c", "--target", "t", "--prompts", "p"],
        [prepare.main, "--input", "i", "--output", str(tmp_path / "out"), "--target", "t", "--regenerate"],
    ):
        main, *given = command
        with pytest.raises(SystemExit, match="2"):
            main([*given, f"--temperature={value}"])  # type: ignore[operator]
        assert f"error: --temperature {ALLOWED}{float(value)}\n" in capsys.readouterr().err


def test_a_temperature_of_a_configuration_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "target": {"path": "target"},
        "data": {"path": "out"},
        "prepare": {"input": ["chats.jsonl"], "regenerate": True, "temperature": 1e-320},
        "run": {"root": str(tmp_path)},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert prepare.main([str(tmp_path / "config.json")]) == 3
    assert capsys.readouterr().err == f"error: prepare.temperature {ALLOWED}1e-320\n"


def chats(folder: Path, count: int) -> list[str]:
    chat = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi, you"}]}
    (folder / "chats.jsonl").write_text((json.dumps(chat) + "\n") * count)
    return ["--input", str(folder / "chats.jsonl"), "--output", str(folder / "out"), "--target", str(folder / "target")]


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{{ messages[0].content + 5 }}", 'can only concatenate str (not "int") to str'),
        ("{% generation %}{{ 1 // 0 }}{% endgeneration %}", "integer division or modulo by zero"),
        ("{% for m in messages %}\n{{ m.content }", "unexpected '}'"),
        ("{{ raise_exception(messages[0].content) }}", "hello"),
    ],
)
def test_a_template_that_fails_drops_the_conversation(
    make_target: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, cause: str
) -> None:
    target = make_target(template)
    assert prepare.main(chats(tmp_path, 2)) == 3
    err = capsys.readouterr().err
    assert err.endswith(f"no conversation is left to train on (2 dropped: the chat template refuses it: {cause})\n")
    assert err.count("\n") == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    with pytest.raises(DataError, match=r"prompt 1: the target's chat template refuses it: [a-z]"):
        read_prompts(tmp_path / "chats.jsonl", tokenizer)


def test_conversations_that_are_all_held_out_are_told(
    make_target: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_target()
    given = chats(tmp_path, 3)
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write('{"messages": []}\n')
    assert prepare.main([*given, "--held-out", "0.999"]) == 3
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'chats.jsonl'}: no conversation is left to train on (all 3 that could be are held out, "
        "for the share is 0.999; 1 dropped: the assistant says nothing)\n"
    )
