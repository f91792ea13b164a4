"""What is learnt of conversations in Qwen3's own chat template, whose thinking tags come and go with an answer's place."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import transformers

from trainer import responses
from trainer.conversations import Dropped

QWEN3 = Path(__file__).with_name("qwen3.jinja")
THINKS = "<think>\nshort words\n</think>\n\n"
HELLO = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
HOW = "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture
def tokenizer(make_target: Callable[[str], Path]) -> Any:
    return transformers.AutoTokenizer.from_pretrained(make_target(QWEN3.read_text()))


def chat(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def marked(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The text with all that is learnt in double brackets."""
    tokens, loss_mask = responses.encode(tokenizer, messages)
    spans = groupby(zip(tokens.tolist(), loss_mask.tolist(), strict=True), key=lambda pair: pair[1])
    texts = [(learnt, tokenizer.decode([token for token, _ in pairs])) for learnt, pairs in spans]
    return "".join(f"⟦{text}⟧" if learnt else text for learnt, text in texts)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (chat("hello", "hi, you"), f"{HELLO}⟦{EMPTY}hi, you<|im_end|>⟧\n"),
        (
            chat("hello", "hi, you", "how?", "well", system="Be brief"),
            f"<|im_start|>system\nBe brief<|im_end|>\n{HELLO}⟦hi, you<|im_end|>⟧\n{HOW}⟦{EMPTY}well<|im_end|>⟧\n",
        ),
        (chat("hello", f"{THINKS}hi"), f"{HELLO}⟦{THINKS}hi<|im_end|>⟧\n"),
        (
            chat("hello", f"{THINKS}hi", "how?", f"{THINKS}well", system="Be brief"),
            f"<|im_start|>system\nBe brief<|im_end|>\n{HELLO}⟦hi<|im_end|>⟧\n{HOW}⟦{THINKS}well<|im_end|>⟧\n",
        ),
        (chat("hello", f"{THINKS}hi", "how?", "well"), f"{HELLO}⟦hi<|im_end|>⟧\n{HOW}⟦{EMPTY}well<|im_end|>⟧\n"),
        (
            chat("hello", f"{EMPTY}hi", "how?", f"{EMPTY}well"),
            f"{HELLO}⟦hi<|im_end|>⟧\n{HOW}⟦{EMPTY}well<|im_end|>⟧\n",
        ),
        (
            chat("hello", "short words", "how?", f"{THINKS}short words"),
            f"{HELLO}⟦short words<|im_end|>⟧\n{HOW}⟦{THINKS}short words<|im_end|>⟧\n",
        ),
        (
            chat("hello", "hello", "how?", "how?", "hello", "hello"),
            f"{HELLO}⟦hello<|im_end|>⟧\n{HOW}⟦how?<|im_end|>⟧\n{HELLO}⟦{EMPTY}hello<|im_end|>⟧\n",
        ),
        (chat("hello", "a, b\n\nor d", "how?", "d"), f"{HELLO}⟦a, b\n\nor d<|im_end|>⟧\n{HOW}⟦{EMPTY}d<|im_end|>⟧\n"),
        (chat("hello", "end", "how?", "end"), f"{HELLO}⟦end<|im_end|>⟧\n{HOW}⟦{EMPTY}end<|im_end|>⟧\n"),
        (chat("hello", "user", "how?", "|>"), f"{HELLO}⟦user<|im_end|>⟧\n{HOW}⟦{EMPTY}|><|im_end|>⟧\n"),
        (chat("hello", ">"), f"{HELLO}⟦{EMPTY}><|im_end|>⟧\n"),
        (
            chat("hello", "it says <think> first", "how?", "by <think>"),
            f"{HELLO}⟦it says <think> first<|im_end|>⟧\n{HOW}⟦{EMPTY}by <think><|im_end|>⟧\n",
        ),
    ],
    ids=[
        "one turn",
        "system prompt and two turns",
        "thoughts",
        "thoughts of the last answer alone",
        "thoughts of an earlier answer alone",
        "empty thoughts",
        "thoughts that say the answer",
        "answers that repeat the question",
        "an answer that is a letter of the end of turn",
        "an answer that is a word of the end of turn",
        "an answer that is how the end of turn ends",
        "an answer that is the last letter of tags before and behind it",
        "an answer about the tag",
    ],
)
def test_what_is_learnt(tokenizer: Any, messages: list[dict[str, str]], expected: str) -> None:
    assert marked(tokenizer, messages) == expected


@pytest.mark.parametrize("messages", [chat("hello", THINKS), chat("hello", THINKS, "how?", "well"), chat("hello", EMPTY)])
def test_an_answer_that_is_nothing_but_thoughts_is_dropped(tokenizer: Any, messages: list[dict[str, str]]) -> None:
    with pytest.raises(Dropped, match="an answer is nothing but thoughts"):
        responses.encode(tokenizer, messages)


def test_what_the_target_is_asked_with_begins_what_is_learnt(tokenizer: Any) -> None:
    """Else the first token that a drafter learns would not be the first that it has to draft."""
    messages = chat("hello", f"{THINKS}hi", "how?", f"{THINKS}well", system="Be brief")
    text, spans = responses.response_spans(tokenizer, messages)
    for index, (begin, _) in zip((2, 4), spans, strict=True):
        prompt = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
        assert text[:begin] == prompt


def test_thoughts_that_were_broken_off_are_learnt_as_they_were_written(tokenizer: Any) -> None:
    """The template would put its empty tags before them."""
    text, spans = responses.response_spans(tokenizer, [*chat("hello", "hi"), *chat("how?", "")[:1]], "<think>\nwell, I")
    assert [text[begin:end] for begin, end in spans] == ["hi<|im_end|>", "<think>\nwell, I"]
    assert text == f"{HELLO}hi<|im_end|>\n{HOW}<think>\nwell, I"


def test_a_system_prompt_may_come_late(tokenizer: Any) -> None:
    late = [*chat("hello", "hi"), {"role": "system", "content": "Be brief"}, *chat("how?", "well")]
    assert marked(tokenizer, late) == (
        f"{HELLO}⟦hi<|im_end|>⟧\n<|im_start|>system\nBe brief<|im_end|>\n{HOW}⟦{EMPTY}well<|im_end|>⟧\n"
    )


def test_of_two_answers_in_a_row_the_first_is_learnt(tokenizer: Any) -> None:
    """It has thinking tags when the target is asked for the second, and none behind it: nothing is asked like that."""
    assert marked(tokenizer, [*chat("hello", "hi"), {"role": "assistant", "content": "there"}]) == (
        f"{HELLO}⟦hi<|im_end|>⟧\n<|im_start|>assistant\n{EMPTY}there<|im_end|>\n"
    )


@pytest.fixture
def thinker(make_target: Callable[[str], Path]) -> Any:
    """Like Qwen3-4B-Thinking-2507: the prompt opens the thoughts, and earlier answers have none."""
    opening, plain = "{{- '<|im_start|>assistant\\n<think>\\n' }}", "{{- '<|im_start|>assistant\\n' }}"
    assert QWEN3.read_text().count(plain) == 1
    return transformers.AutoTokenizer.from_pretrained(make_target(QWEN3.read_text().replace(plain, opening)))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (chat("hello", "hi, you"), f"{HELLO}<think>\n⟦\n</think>\n\nhi, you<|im_end|>⟧\n"),
        (
            chat("hello", f"{THINKS}hi", "how?", f"{THINKS}well"),
            f"{HELLO}hi<|im_end|>\n{HOW}<think>\n⟦short words\n</think>\n\nwell<|im_end|>⟧\n",
        ),
        (
            chat("hello", "well", "how?", f"{THINKS}well", "hello", f"{THINKS}well"),
            f"{HELLO}well<|im_end|>\n{HOW}well<|im_end|>\n{HELLO}<think>\n⟦short words\n</think>\n\nwell<|im_end|>⟧\n",
        ),
    ],
)
def test_where_prompts_open_the_thoughts_the_last_answer_alone_is_learnt(
    thinker: Any, messages: list[dict[str, str]], expected: str
) -> None:
    assert marked(thinker, messages) == expected


def test_where_prompts_open_the_thoughts_one_that_was_broken_off_is_learnt(thinker: Any) -> None:
    text, spans = responses.response_spans(thinker, [*chat("hello", "hi"), *chat("how?", "")[:1]], "well, I")
    assert text == f"{HELLO}hi<|im_end|>\n{HOW}<think>\nwell, I"
    assert [text[begin:end] for begin, end in spans] == ["well, I"]
