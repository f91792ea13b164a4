"""Which tokens of a conversation are the assistant's: those that a drafter learns.

A module of its own because it is all about chat templates, and `trainer.prepare` about files. Pure.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from trainer.conversations import Dropped, Messages

_ENDING = re.compile(r"\s*\S*")
"""What closes an answer: the first word after it, such as <|im_end|> or </s>; of tags without space between, those that close
earlier answers too."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, unfinished: str = ""
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Token ids and loss mask of a conversation, both [T]; raises Dropped.

    It ends with an answer, or with a question and how the answer begins: `unfinished`, as the target wrote it.
    """
    if _GENERATION.search(str(tokenizer.chat_template)):
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        out = rendered(tokenizer, messages, add_generation_prompt=bool(unfinished), **options)
        begun = tokenizer(unfinished, add_special_tokens=False)["input_ids"] if unfinished else []
        loss_mask = np.array([*out["assistant_masks"], *[1] * len(begun)], dtype=np.bool_)
        return np.array([*out["input_ids"], *begun], dtype=np.uint32), loss_mask
    text, spans = response_spans(tokenizer, messages, unfinished)
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = np.array([start for start, _ in out["offset_mapping"]])
    loss_mask = np.zeros(len(starts), dtype=np.bool_)
    for begin, end in spans:
        loss_mask |= (starts >= begin) & (starts < end)
    return np.array(out["input_ids"], dtype=np.uint32), loss_mask


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options: Any) -> Any:
    """What `apply_chat_template` gives; raises Dropped, with the cause, where a template refuses or fails in any way."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        raise Dropped("the chat template refuses it") from error


def response_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, unfinished: str = ""
) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation and the characters [begin, end) of each answer, end of turn included; raises Dropped.

    An answer begins after the prompt that the template renders for it, and ends with its own text and the end of turn; in
    between stands what the template adds, such as Qwen3's thinking tags around nothing. Where the whole text does not begin
    with that prompt, as with earlier answers of a template whose prompts open the thoughts, the answer is not learnt, for
    nothing is asked like that. The end of turn is what follows the last answer, cut to the tags that follow all; an
    `unfinished` one has none.
    """

    def render(count: int, *, prompt: bool = False) -> str:
        return str(rendered(tokenizer, messages[:count], tokenize=False, add_generation_prompt=prompt))

    text = render(len(messages), prompt=bool(unfinished))
    begun = [(len(text), len(text) + len(unfinished))] if unfinished else []
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    asked = [(i, prompt) for i in answers if text.startswith(prompt := render(i, prompt=True))]
    if not asked and not begun:
        raise Dropped("the chat template renders its turns differently inside the whole conversation")
    if not asked:
        return text + unfinished, begun
    learnt, prompts = zip(*asked, strict=True)
    bodies = [messages[i]["content"].rpartition("</think>")[2].strip() for i in learnt]
    if not all(bodies):
        raise Dropped("an answer is nothing but thoughts")
    limits = [len(prompt) for prompt in prompts[1:]] + [len(text)]
    up_to_last = render(learnt[-1] + 1)  # a question behind it would look like its end
    for ending in _endings(up_to_last[len(prompts[-1]) :], bodies[-1]):
        closed = [body + ending for body in bodies]
        found = [text.find(closed[i], len(prompts[i]), limits[i]) for i in range(len(bodies))]
        if min(found) >= 0:
            return text + unfinished, [(len(prompts[i]), found[i] + len(closed[i])) for i in range(len(bodies))] + begun
    raise Dropped("the chat template changes the assistant's text")


def _endings(last_answer: str, body: str) -> Iterator[str]:
    """What may close an answer: the word behind `body`, then what is left of it without its last tag, its last two and so on.

    From the first place of `body` behind the thoughts on: these may hold it too, and so may the end of turn (`d`, `>`).
    """
    place = last_answer.find(body, len(last_answer) - len(last_answer.rpartition("</think>")[2]))
    while place >= 0:
        match = _ENDING.match(last_answer, place + len(body))
        assert match is not None
        longest = match[0]
        yield longest
        yield from (longest[:end] for end in range(len(longest) - 1, 0, -1) if longest[end - 1] == ">")
        place = last_answer.find(body, place + 1)


def cut(loss_mask: NDArray[np.bool_], max_tokens: int) -> tuple[int, bool]:
    """How many tokens to keep, up to the end of the last answer that fits, and whether an answer is lost; raises Dropped."""
    ends = np.flatnonzero(np.diff(loss_mask.astype(np.int8), append=0) == -1) + 1
    fitting = ends[ends <= max_tokens]
    if not len(ends):
        raise Dropped("the chat template marks no token as the assistant's")
    if not len(fitting):
        raise Dropped(f"its first answer ends after {max_tokens} tokens")
    return int(fitting[-1]), len(fitting) < len(ends)
