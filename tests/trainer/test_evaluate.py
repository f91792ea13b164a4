import json
import math
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trainer import evaluate
from trainer.checkpoint import checkpoint_digest
from trainer.decoding import Response, Round
from trainer.errors import DataError
from trainer.evaluate import by_position, ratio_interval, read_prompts
from trainer.events import alone_in


def arguments(trained: Any, prompts: Path, *more: str) -> list[str]:
    given = ["--checkpoint", str(trained.checkpoint), "--target", str(trained.target), "--prompts", str(prompts)]
    return [*given, "--max-new-tokens", "12", "--dtype", "float32", *more]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    records = ["w1 w2 w3", {"task_id": "T/0", "prompt": "w9 w4"}, {"messages": [{"role": "user", "content": "w5 w6"}]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_one_document_says_what_was_accepted_and_how_fast(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(arguments(trained, trained.shards)) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert out.count("\n") == 1
    accepted = document["acceptance_length"]
    assert accepted["mean"] == accepted["tokens"] / accepted["verifications"]
    assert 1.3 < accepted["mean"] < 4
    low, high = accepted["interval_95"]
    assert 1 < low < accepted["mean"] < high
    first, *rest = document["accepted_by_position"]
    assert [p["position"] for p in (first, *rest)] == [1, 2, 3]
    assert accepted["verifications"] == first["offered"] > rest[-1]["offered"]
    count = len(trained.prompts)
    assert (document["prompts"]["count"], document["equal_to_plain"]) == (count, count)
    told = [line for line in err.splitlines() if line.startswith("answered ")]
    assert re.fullmatch(rf"answered 1 of {count} prompts: [1-4]\.\d\d tokens a verification", told[0])
    assert told[-1] == f"answered {count} of {count} prompts: {accepted['mean']:.2f} tokens a verification"
    speeds = document["tokens_per_s"]
    assert document["speedup"] == speeds["speculative"] / speeds["plain"] > 0


def test_prompts_come_as_texts_records_and_chats_and_bf16_and_sampling_run_too(
    trained: Any, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = ["--temperature", "0.7", "--dtype", "bfloat16", "--limit", "2", "--output", str(tmp_path / "out")]
    assert evaluate.main(arguments(trained, words, *sampled)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prompts"] == {"source": str(words), "count": 2}
    assert document["equal_to_plain"] is None
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == document
    told = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in told] == ["started", "prompt", "prompt", "finished"]
    assert told[-1]["acceptance_length"] == document["acceptance_length"]
    assert told[1]["equal_to_plain"] is None, "sampled answers need not be equal"
    assert document["checkpoint_sha256"] == checkpoint_digest(trained.checkpoint)
    assert evaluate.main(arguments(trained, words, *sampled)) == 3
    assert "has an evaluation.json already; remove it or choose another --output" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == document


def test_the_events_of_a_run_that_works_there_stay(
    trained: Any, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "events.jsonl").write_text("of the training")
    with alone_in(out):
        assert evaluate.main(arguments(trained, words, "--output", str(out))) == 3
    assert capsys.readouterr() == ("", f"error: {out}: another run works in this folder\n")
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("events.jsonl", "of the training")]
    assert evaluate.main(arguments(trained, words, "--output", str(out))) == 0, "nobody works there any more"


def test_of_two_evaluations_with_one_output_the_later_is_refused(
    trained: Any, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, codes = arguments(trained, words, "--output", str(tmp_path / "out")), []

    def meanwhile(*_: Any) -> dict[str, Any]:
        codes.append(evaluate.main(given))
        return {"by": "the first"}

    monkeypatch.setattr(evaluate, "evaluate", meanwhile)
    assert (evaluate.main(given), codes) == (0, [3])
    assert capsys.readouterr().err == f"error: {tmp_path / 'out'}: another run works in this folder\n"
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == {"by": "the first"}


@pytest.mark.parametrize(
    ("number", "code", "told"), [(signal.SIGINT, 130, "stopped by SIGINT"), (signal.SIGTERM, 143, "stopped by SIGTERM")]
)
def test_a_signal_ends_it_without_a_traceback_and_is_told(
    trained: Any, tmp_path: Path, number: int, code: int, told: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"w1 w2 w3"\n' * 5000)
    command = [sys.executable, "-m", "trainer.evaluate", *arguments(trained, prompts, "--output", str(tmp_path / "out"))]
    events = tmp_path / "out" / "events.jsonl"
    # a test run in the background of a script inherits an ignored SIGINT, and so would its children
    with subprocess.Popen(["env", "--default-signal=INT", *command], stderr=subprocess.PIPE, text=True) as process:
        try:
            moment = threading.Event()
            while not (events.exists() and '"event": "prompt"' in events.read_text()):
                assert process.poll() is None, process.communicate()[1]
                moment.wait(0.05)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code
    assert "Traceback" not in err
    last = json.loads(events.read_text().splitlines()[-1])
    assert (last["event"], last["error"]) == ("failed", told)
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_a_prompt_is_what_stands_before_the_first_answer_as_the_chat_template_opens_it(trained: Any, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.target)
    path = tmp_path / "chats.jsonl"
    turns = [("human", "w1"), ("gpt", "w2"), ("human", "w3"), ("gpt", "w4")]
    path.write_text(json.dumps({"conversations": [{"from": role, "value": text} for role, text in turns]}))
    assert tokenizer.convert_ids_to_tokens(read_prompts(path, tokenizer)[0]) == ["w1"]
    tokenizer.chat_template = (
        "{% for m in messages %}w7 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
    )
    assert tokenizer.convert_ids_to_tokens(read_prompts(path, tokenizer)[0]) == ["w7", "w1", "w8"]
    tokenizer.chat_template = None
    assert read_prompts(trained.shards, tokenizer) == trained.prompts


def test_a_prompt_that_the_template_refuses_is_one_sentence(trained: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('"w1"\n"w2"\n')
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.target)
    tokenizer.chat_template = "{% if messages[0].content == 'w2' %}{{ raise_exception('not this') }}{% endif %}w1"
    with pytest.raises(DataError, match=r"prompts\.jsonl: prompt 2: the target's chat template refuses it: not this"):
        read_prompts(tmp_path / "prompts.jsonl", tokenizer)


def test_positions_past_the_responses_end_are_not_counted() -> None:
    # 1 first token; a round of 3 (2 accepted); a round that ends the response with its second draft
    response = Response([5, 6, 7, 8, 9, 1], True, 0.0, 0.0, [Round(3, 2, 3), Round(3, 2, 2)])
    counts = [(p["offered"], p["accepted"], p["share"]) for p in by_position([response], 4)]
    assert counts == [(2, 2, 1.0), (2, 2, 1.0), (1, 0, 0.0)]
    assert by_position([Response([1], True, 0.0)], 2) == [{"position": 1, "offered": 0, "accepted": 0, "share": None}]


def test_the_interval_is_that_of_a_ratio_over_prompts() -> None:
    low, high = ratio_interval([6, 2], [2, 2]) or (0, 0)
    half = 1.959964 * math.sqrt((2**2 + 2**2) * 2 / 1) / 4  # ratio 2; residuals 6 - 2 * 2 and 2 - 2 * 2
    assert (low, high) == pytest.approx((2 - half, 2 + half))
    assert ratio_interval([4, 2], [2, 1]) == pytest.approx((2, 2))
    assert ratio_interval([4], [2]) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "prompts.jsonl: there is no prompt here"),
        ("{", "prompts.jsonl:1: not JSON: "),
        ('"w1"\n[1]', "prompts.jsonl:2: needs a list `messages`"),
        ('{"messages": []}', "prompts.jsonl:1: no prompt: the user says nothing before the assistant"),
        ('{"messages": [{"role": "assistant", "content": "w1"}]}', "no prompt: the user says nothing before the assistant"),
        ('{"prompt": " "}', "prompts.jsonl:1: no prompt: a turn has no text"),
        (
            f'"{"w1 " * 60}"',
            "prompts.jsonl: prompt 1 has 60 tokens; with --max-new-tokens 12 it must be within the target's 64",
        ),
    ],
)
def test_unusable_prompts_are_one_sentence(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    assert evaluate.main(arguments(trained, tmp_path / "prompts.jsonl")) == 3
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert sentence in err
    assert err.count("\n") == 1


FLOATS = "norm.weight must be one of float64, float32, float16, bfloat16, got "


def _remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _truncate(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-10])


def _no_dflash(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]
    (folder / "config.json").write_text(json.dumps(config))


def _other_target(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_target_layers": 30}))


def _tensors(change: Any) -> Any:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_remove, "no checkpoint here: "),
        (_truncate, "the checkpoint cannot be read: "),
        (_no_dflash, "config.json must be a DFlash drafter's: 'mask_token_id' is missing"),
        (_other_target, "made for another target: layers, width and vocabulary must be (4, 32, 64), got (30, 32, 64)"),
        (_tensors(lambda t: t.update({"fc.weight": t["norm.weight"].clone()})), "fc.weight must be [32, 64], got [32]"),
        (_tensors(lambda t: t.pop("norm.weight")), "norm.weight must be [32], got nothing"),
        (_tensors(lambda t: t["norm.weight"].fill_(math.nan)), "norm.weight must hold finite numbers alone, got others"),
        (_tensors(lambda t: t["fc.weight"][3].fill_(-math.inf)), "fc.weight must hold finite numbers alone, got others"),
        *(
            (_tensors(lambda t, kind=kind: t.update({"norm.weight": t["norm.weight"].to(kind)})), f"{FLOATS}{name}")
            for kind, name in ((torch.bool, "bool"), (torch.int8, "int8"), (torch.complex64, "complex64"))
        ),
        (_tensors(lambda t: t.update(other=t["norm.weight"].clone())), "holds tensors that no drafter has, such as other"),
    ],
)
def test_an_unusable_checkpoint_is_one_sentence(
    trained: Any, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, sentence: str
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((trained.checkpoint / name).read_bytes())
    damage(folder)
    given = arguments(trained, words, "--output", str(tmp_path / "out"))
    given[1] = str(folder)
    assert evaluate.main(given) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    told = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in told] == ["started", "failed"]
    assert sentence in told[-1]["error"]
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_shards_of_another_tokenizer_and_devices_that_are_not_here_are_refused(
    trained: Any, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "shards"
    foreign.mkdir()
    (foreign / "held_out").symlink_to(trained.shards / "held_out")
    meta = json.loads((trained.shards / "meta.json").read_text())
    (foreign / "meta.json").write_text(json.dumps(meta | {"tokenizer_digest": "other"}))
    assert evaluate.main(arguments(trained, foreign)) == 3
    assert "was made with another vocabulary or chat template" in capsys.readouterr().err
    assert evaluate.main(arguments(trained, words, "--device", "cuda:7")) == 3
    assert "the device must be cpu or one of the 0 GPUs as cuda:N, got cuda:7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "code", "sentence"),
    [
        ("--checkpoint", 1, "no checkpoint here: "),
        ("--prompts", 3, " cannot be read: "),
        ("--output", 3, " cannot be used: "),
    ],
)
@pytest.mark.parametrize("name", ["x" * 300, "loop"])
def test_a_path_that_leads_nowhere_is_one_sentence(
    trained: Any,
    words: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    code: int,
    sentence: str,
    name: str,
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert evaluate.main([*arguments(trained, words), option, str(tmp_path / name)]) == code
    err = capsys.readouterr().err
    assert sentence in err
    assert (err.startswith("error: "), err.count("\n")) == (True, 1)
