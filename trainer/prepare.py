"""Chats become token shards: `python -m trainer.prepare CONFIG.json`, or by hand with --input, --output and --target.

CONFIG.json is that of the run that will train on them: its section `prepare` says of what they are made, and how, `data.path`
is where they go, `batch.row_tokens` how long a document may be. What happens is told in events.jsonl beside it; that of an
earlier start is moved aside, as events.1.jsonl or the next number.

Each line holds a conversation, as `messages` (role, content) or ShareGPT `conversations` (from, value). The target's own chat
template renders it; the assistant's tokens, the end of their turn included, are the responses that a drafter learns. A template
with a `{% generation %}` block tells them itself; else they lie between the prompt that the template renders before an answer
and the end of that answer. An answer whose prompt is not a true prefix of the whole is not learnt; where none is, the
conversation is dropped.

A conversation longer than --max-tokens is cut after the last answer that fits, because a conversation's beginning is itself a
conversation; one whose first answer does not fit is dropped. Nothing is left behind when anything fails.

With --regenerate the target itself answers what the users say, for a drafter is to draft the target's words, not other
people's. What is answered is kept in OUTPUT.regenerated.jsonl, and the same command goes on from there. An answer that does
not end within --max-new-tokens is learnt as far as that.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trainer.answers import Answers, LocalAnswers, ServerAnswers
from trainer.config import BatchConfig, PrepareConfig, TargetConfig, TrainConfig, is_url
from trainer.conversations import Dropped, Messages, before_answer, conversations, questions
from trainer.dataset import ShardWriter, Split, folder_that_appears_whole
from trainer.decoding import TEMPERATURES, Sampling, is_temperature, stop_token_ids, usable_device
from trainer.errors import ConfigError, DataError, TrainerError, sentence
from trainer.events import FAILED, FINISHED, HEARTBEAT, PROGRESS, STARTED, EventLog, alone_in, free_number, set_aside
from trainer.model.target import load_causal_lm, load_tokenizer, tokenizer_digest
from trainer.regenerate import Progress, Regeneration, regenerate, regenerated
from trainer.responses import cut, encode

_TICK_S = 10.0
"""Between two lines of progress."""
HEARTBEAT_S = 30.0
"""Between two heartbeats, as training has them."""
OVERDUE_S = 600.0
"""Without any answer; the longest ones take minutes."""
_JOIN_S = 10.0


@dataclass(slots=True)
class Report:
    """What became of the conversations."""

    output: Path
    max_tokens: int
    documents: Counter[Split] = field(default_factory=Counter)
    tokens: int = 0
    response_tokens: int = 0
    shortened: int = 0
    unfinished: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    causes: dict[str, str] = field(default_factory=dict)
    """What a chat template said of the first that was dropped for it, by reason."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Turns, each kind once a conversation."""

    def told(self, reason: str) -> str:
        """The reason with its first cause, on one line."""
        cause = self.causes.get(reason)
        return " ".join(f"{reason}: {cause}".split()) if cause else reason

    def __str__(self) -> str:
        """A few lines for people."""
        kept, dropped = self.documents.total(), self.dropped.total()
        lines = [
            f"kept {kept} of {kept + dropped} conversations: "
            f"{self.documents['train']} to train on, {self.documents['held_out']} held out",
            f"{self.tokens} tokens, {self.response_tokens} of them responses",
            f"shortened {self.shortened} to their last answer within {self.max_tokens} tokens",
            *([f"{self.unfinished} end with an answer that was broken off"] if self.unfinished else []),
            *(f"left out of {count} conversations: {which}" for which, count in self.left_out.most_common()),
            f"dropped {dropped}",
            *(f"  {count}  {reason}" for reason, count in self.dropped.most_common()),
        ]
        return "\n".join([*lines, f"wrote {self.output}"]) + "\n"

    def document(self) -> dict[str, Any]:
        """The same for events.jsonl."""
        return {
            "output": str(self.output),
            "kept": dict(self.documents),
            "tokens": self.tokens,
            "response_tokens": self.response_tokens,
            "shortened": self.shortened,
            "unfinished": self.unfinished,
            "left_out": dict(self.left_out),
            "dropped": dict(self.dropped),
        }


def prepare(
    inputs: Sequence[Path],
    output: Path,
    target: TargetConfig,
    *,
    max_tokens: int,
    held_out: float,
    root: Path = Path(),
    regeneration: Regeneration | None = None,
    tell: Callable[[Progress], object] = lambda _progress: None,
) -> Report:
    """Write shards of all conversations in `inputs` to `output`, which must not exist; raises DataError, TargetError.

    `held_out` is the share of conversations set aside. What stands before a conversation's first answer alone decides, so that
    conversations that begin alike lie on one side. With `regeneration` the target, whose folder may be relative to `root`,
    writes the answers, and `tell` is called with each.
    """
    try:
        if output.exists():
            raise DataError(f"{output} exists already; remove it or choose another place")
    except OSError as error:  # of a folder that may not be entered, or a name that is too long
        raise DataError(f"{output} cannot be written: {error}") from None
    tokenizer = load_tokenizer(target, root)
    if not tokenizer.chat_template:
        raise DataError(f"{target.path}: the target's tokenizer has no chat template, so answers cannot be told from prompts")
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{target.path}: the target's tokenizer must be a fast one, for it tells where in a text each token lies; "
            f"got {type(tokenizer).__name__}"
        )
    report = Report(output, max_tokens)
    if regeneration is None:
        chats = ((messages, "") for messages in conversations(inputs, report.dropped, report.left_out))
    else:
        chats = _answered(inputs, target, root, tokenizer, regeneration, report, tell)
    with folder_that_appears_whole(output) as folder, ShardWriter(folder) as writer:
        for chat in chats:
            _add(writer, report, tokenizer, chat, held_out)
        if not report.documents["train"]:
            reasons = [f"{count} dropped: {report.told(reason)}" for reason, count in report.dropped.most_common(3)]
            if report.documents["held_out"]:
                reasons.insert(
                    0, f"all {report.documents['held_out']} that could be are held out, for the share is {held_out:g}"
                )
            raise DataError(f"{inputs[0]}: no conversation is left to train on ({'; '.join(reasons) or 'none was given'})")
        about = {
            "target": target.path,
            "gguf_file": target.gguf_file,
            "max_tokens": max_tokens,
            "shortened": report.shortened,
            "unfinished": report.unfinished,
            "left_out": dict(report.left_out),
            "dropped": dict(report.dropped),
            "regenerated": asdict(regeneration) if regeneration else None,
        }
        writer.finish(tokenizer_digest=tokenizer_digest(tokenizer), about=about)
    return report


def _answered(
    inputs: Sequence[Path],
    target: TargetConfig,
    root: Path,
    tokenizer: PreTrainedTokenizerBase,
    settings: Regeneration,
    report: Report,
    tell: Callable[[Progress], object],
) -> Iterator[tuple[Messages, str]]:
    """The conversations of `inputs` with the target's own answers, which lie in a journal beside the output."""
    asked = list(questions(inputs, report.dropped, report.left_out))
    made_with = {
        "inputs": list(map(_file_digest, inputs)),
        "answers": "from a server" if settings.server else f"here, in {target.dtype}",
        "target": settings.server_model or target.path,
        "gguf_file": target.gguf_file,
        "tokenizer_digest": tokenizer_digest(tokenizer),
        "max_tokens": report.max_tokens,
        "temperature": settings.temperature,
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "unfinished": "kept",
    }
    if report.left_out:  # a journal of when such conversations were dropped numbers the others differently
        made_with["left_out"] = dict(report.left_out)
    journal = report.output.with_name(f"{report.output.name}.regenerated.jsonl")
    somebody = functools.partial(_somebody, target, root, tokenizer, settings, report.max_tokens)
    regenerate(asked, somebody, journal, made_with, tell)
    return regenerated(journal, made_with, len(asked), report.dropped, report.causes)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _somebody(
    target: TargetConfig,
    root: Path,
    tokenizer: PreTrainedTokenizerBase,
    settings: Regeneration,
    max_tokens: int,
    num_known: int,
    num_left: int,
) -> Answers:
    """Who answers when `num_known` conversations have been and `num_left` are left: a server, or the target in this process.

    The sampling of a later start has a seed of its own: the same again would answer other questions by the same draws.
    """
    if settings.server is not None:
        return ServerAnswers(
            settings.server,
            settings.server_model or target.path,
            temperature=settings.temperature,
            num_rows=settings.num_rows,
            max_new_tokens=settings.max_new_tokens,
            works=num_known > 0,
        )
    device = usable_device(settings.device)
    model = load_causal_lm(target, root, device)
    seed = int(np.random.SeedSequence([settings.seed, num_known]).generate_state(1, np.uint64)[0])
    sampling = Sampling(settings.temperature, torch.Generator(device).manual_seed(seed))
    return LocalAnswers(
        model,
        tokenizer,
        stop_token_ids(model, tokenizer),
        sampling,
        num_rows=min(settings.num_rows, num_left),
        max_tokens=max_tokens,
        max_new_tokens=settings.max_new_tokens,
    )


def _add(
    writer: ShardWriter, report: Report, tokenizer: PreTrainedTokenizerBase, chat: tuple[Messages, str], held_out: float
) -> None:
    messages, unfinished = chat
    try:
        tokens, loss_mask = encode(tokenizer, messages, unfinished)
        if unfinished and loss_mask[report.max_tokens - 1 : report.max_tokens].any():  # it may as well be broken off here
            tokens, loss_mask = tokens[: report.max_tokens], loss_mask[: report.max_tokens]
        length, shortened = cut(loss_mask, report.max_tokens)
        tokens, loss_mask = tokens[:length], loss_mask[:length]
        if not (loss_mask[1:] & loss_mask[:-1]).any():
            raise Dropped("its answers are single tokens")
    except Dropped as reason:
        report.dropped[str(reason)] += 1
        if reason.__cause__:
            report.causes.setdefault(str(reason), str(reason.__cause__))
        return
    split: Split = "held_out" if _fraction(messages) < held_out else "train"
    writer.append(split, tokens, loss_mask)
    report.documents[split] += 1
    report.tokens += length
    report.response_tokens += int(loss_mask.sum())
    report.shortened += shortened
    report.unfinished += bool(unfinished) and not shortened


def _fraction(messages: Messages) -> float:
    """0..1, evenly spread, by what stands before the first answer."""
    digest = hashlib.sha256(json.dumps(before_answer(messages), sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args = parser.parse_args(given)
    if args.config is not None and len(given) > 1:
        parser.error("CONFIG.json says everything; it goes with no option")
    try:
        report = _recorded(args.config) if args.config is not None else _by_hand(parser, args)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stopped, nothing was written but what the target has answered; the same command goes on from there\n")
        return 130
    sys.stdout.write(str(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.prepare", description="Chats become token shards.")
    parser.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG.json", help="do what a run's configuration says, without any option"
    )
    parser.add_argument("--input", type=Path, nargs="+", help="JSONL files, one conversation a line")
    parser.add_argument("--output", type=Path, help="folder to write; must not exist")
    parser.add_argument("--target", help="folder or hub id of the target model")
    parser.add_argument("--gguf-file", help="name of a GGUF file inside the target's folder")
    parser.add_argument("--max-tokens", type=int, default=BatchConfig().row_tokens, help="longest document (%(default)s)")
    held_out = PrepareConfig().held_out
    parser.add_argument("--held-out", type=float, default=held_out, help="share set aside for validation (%(default)s)")
    group = parser.add_argument_group("the target writes the answers")
    group.add_argument(
        "--regenerate", action="store_true", help="replace all answers by the target's own; needed by what follows"
    )
    defaults = Regeneration()
    group.add_argument(
        "--temperature", type=float, default=defaults.temperature, help=f"{TEMPERATURES}; 0 is greedy (%(default)s)"
    )
    group.add_argument("--max-new-tokens", type=int, default=defaults.max_new_tokens, help="longest answer (%(default)s)")
    group.add_argument("--rows", type=int, default=defaults.num_rows, help="answers in progress at once (%(default)s)")
    group.add_argument("--seed", type=int, default=defaults.seed, help="of sampling here (%(default)s)")
    group.add_argument("--device", default=defaults.device, help="cpu or cuda:N (%(default)s)")
    group.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the target (bfloat16)")
    group.add_argument("--server", help="URL of an OpenAI-compatible server that runs the target, such as http://host:8000/v1")
    group.add_argument("--server-model", help="what the server calls the target, if not as --target")
    return parser


def _by_hand(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Report:
    """What the options say."""
    if not (args.input and args.output and args.target):
        parser.error("CONFIG.json, or --input, --output and --target are required")
    if args.max_tokens < 1 or not 0 <= args.held_out < 1:
        parser.error("--max-tokens must be at least 1 and --held-out 0..1, 1 excluded")
    if args.seed < 0 or args.max_new_tokens < 1 or args.rows < 1:
        parser.error("--seed must be at least 0, --max-new-tokens and --rows at least 1")
    if not is_temperature(args.temperature):
        parser.error(f"--temperature must be {TEMPERATURES}, got {args.temperature}")
    if args.server is not None and not is_url(args.server):
        parser.error(f"--server must be a URL such as http://host:8000/v1, got {args.server}")
    regeneration = Regeneration(
        temperature=args.temperature,
        max_new_tokens=args.max_new_tokens,
        num_rows=args.rows,
        seed=args.seed,
        device=args.device,
        server=args.server,
        server_model=args.server_model,
    )
    if not args.regenerate and (regeneration != Regeneration() or args.dtype):
        parser.error(
            "--temperature, --max-new-tokens, --rows, --seed, --device, --dtype, --server and --server-model need --regenerate"
        )
    return prepare(
        args.input,
        args.output,
        TargetConfig(path=args.target, gguf_file=args.gguf_file, dtype=args.dtype or "bfloat16"),
        max_tokens=args.max_tokens,
        held_out=args.held_out,
        regeneration=regeneration if args.regenerate else None,
        tell=_Ticker(),
    )


def _recorded(path: Path) -> Report:
    """What the configuration of a run says, told in events.jsonl beside it."""
    with contextlib.ExitStack() as held:
        try:
            text = path.read_text(encoding="utf-8")
            held.enter_context(alone_in(path.parent))
            set_aside(path.parent / "events.jsonl", free_number(path.parent))
            log = held.enter_context(contextlib.closing(EventLog(path.parent / "events.jsonl")))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be used: {error}") from None
        try:
            config = TrainConfig.from_json(path, text)
            config.prepare.check()
            log.write(STARTED, input=config.prepare.input, output=config.data.path, target=config.target.path)
            ticker = _Ticker(lambda progress: log.write(PROGRESS, **asdict(progress)))
            with _Pulse(log, ticker) as pulse:
                report = _configured(config, pulse.moved)
            log.write(FINISHED, **report.document())
        except BaseException as error:
            with contextlib.suppress(TrainerError):  # the first cause counts, not a disk that is full by now
                log.write(FAILED, error=sentence(error))
            raise
    return report


def _configured(config: TrainConfig, tell: Callable[[Progress], object]) -> Report:
    root, how = Path(config.run.root), config.prepare
    if not is_temperature(how.temperature):
        raise ConfigError(f"prepare.temperature must be {TEMPERATURES}, got {how.temperature}")
    regeneration = Regeneration(
        temperature=how.temperature,
        max_new_tokens=how.max_new_tokens,
        num_rows=how.rows,
        seed=config.run.seed,
        device=config.prepare_device,
        server=how.server,
        server_model=how.server_model,
    )
    return prepare(
        [root / path for path in how.input],
        root / config.data.path,
        config.target,
        root=root,
        max_tokens=how.max_tokens or config.batch.row_tokens,
        held_out=how.held_out,
        regeneration=regeneration if how.regenerate else None,
        tell=tell,
    )


class _Pulse:
    """Heartbeats in `log` from a thread of its own: overdue where no answer has come for long.

    Before the first answer, while a model is loaded, and after the last one nothing is overdue.
    """

    def __init__(self, log: EventLog, tell: Callable[[Progress], object]) -> None:
        self._log = log
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._moved: float | None = None

    def __enter__(self) -> "_Pulse":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_JOIN_S)

    def moved(self, progress: Progress) -> None:
        """An answer has come, which `tell` is told too."""
        self._moved = time.monotonic() if progress.done < progress.total else None
        self._tell(progress)

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_S):
            moved = self._moved
            idle_s = 0.0 if moved is None else time.monotonic() - moved
            with contextlib.suppress(TrainerError):  # a disk that is full is told by whoever writes what matters
                self._log.write(HEARTBEAT, idle_s=round(idle_s, 3), overdue=idle_s > OVERDUE_S)


class _Ticker:
    """A line on stderr, and whatever `tell` does, not too often."""

    def __init__(self, tell: Callable[[Progress], object] = lambda _progress: None) -> None:
        self._next = time.monotonic()
        self._tell = tell

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now < self._next and progress.done < progress.total:
            return
        self._next = now + _TICK_S
        self._tell(progress)
        left = "" if progress.remaining_s is None else f", {_duration(progress.remaining_s)} left"
        sys.stderr.write(
            f"answered {progress.done} of {progress.total} conversations, {progress.conversations_per_s:.2f}/s, "
            f"{progress.tokens_per_s:.0f} tokens/s{left}\n"
        )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # an exit cleans up, a death does not
    sys.exit(main())
