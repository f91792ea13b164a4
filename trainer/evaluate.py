"""What a drafter is worth: `python -m trainer.evaluate --checkpoint DIR --target MODEL --prompts FILE_OR_SHARDS`.

Each prompt is answered twice, one after the other so that both meet the same machine: by the target alone and by target and
drafter together. One JSON document on stdout says how many tokens a verification gave (acceptance length), how often each block
position was accepted, and how fast both ways were. `--prompts` is a file of JSON lines (a text, `prompt`, `messages` or
`conversations`), or a folder of token shards, whose held-out documents are taken up to their first answer.

acceptance_length is tokens / verifications: draft tokens accepted and the bonus. A verification in which the response ends
counts with what it gave. Its interval is that of a ratio of sums over prompts, which are independent where verifications of one
response are not. accepted_by_position counts only slots that lie inside the response, so its end rejects nothing.
"""

import argparse
import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint import checkpoint_digest, load_checkpoint, resolved
from trainer.config import Dtype, TargetConfig
from trainer.conversations import Dropped, prompts
from trainer.dataset import open_shards
from trainer.decoding import TEMPERATURES, Decoder, Response, Sampling, is_temperature, stop_token_ids, usable_device
from trainer.errors import ConfigError, DataError, TrainerError, sentence
from trainer.events import FAILED, FINISHED, PROMPT, STARTED, EventLog, alone_in, free_number, set_aside
from trainer.model.target import load_causal_lm, load_tokenizer, target_info, tokenizer_digest
from trainer.responses import rendered

_NORMAL_95 = 1.959964
_TICK_S = 10.0
"""Between two lines of progress."""
_WARM_UP_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured, and how."""

    checkpoint: Path
    target: TargetConfig
    prompts: Path
    limit: int | None = None
    """Prompts taken, from the first on. None: all."""
    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Of sampling; every prompt has a generator of its own."""
    device: str = "cpu"
    root: Path = Path()
    """Folder that relative paths start from, also the target's."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, answered both ways."""

    plain: Response
    drafted: Response


def evaluate(settings: Settings, tell: Callable[[Pair, int], object] = lambda _pair, _count: None) -> dict[str, Any]:
    """The document. `tell` is called after each prompt, with how many there are. Raises TrainerError."""
    device = usable_device(settings.device)
    tokenizer = load_tokenizer(settings.target, settings.root)
    given = read_prompts(settings.root / settings.prompts, tokenizer)[: settings.limit]
    model = load_causal_lm(settings.target, settings.root, device)
    info = target_info(model)
    for index, prompt in enumerate(given):
        _check_prompt(f"{settings.prompts}: prompt {index + 1}", prompt, info.vocab_size)
        if len(prompt) + settings.max_new_tokens > info.max_position_embeddings:
            raise DataError(
                f"{settings.prompts}: prompt {index + 1} has {len(prompt)} tokens; with --max-new-tokens "
                f"{settings.max_new_tokens} it must be within the target's {info.max_position_embeddings} positions"
            )
    checkpoint = resolved(settings.root / settings.checkpoint)
    drafter = load_checkpoint(checkpoint, info, model.dtype).to(device, model.dtype).requires_grad_(False)
    digest = checkpoint_digest(checkpoint)
    stop_ids = stop_token_ids(model, tokenizer)
    decoder = Decoder(model, max(map(len, given)) + settings.max_new_tokens, drafter)

    def answer(prompt: Sequence[int], index: int, most: int) -> Pair:
        def sampling() -> Sampling:
            state = np.random.SeedSequence([settings.seed, index]).generate_state(1, np.uint64)
            return Sampling(settings.temperature, torch.Generator(device).manual_seed(int(state[0])))

        plain = decoder.decode(prompt, most, stop_ids, sampling())
        return Pair(plain, decoder.decode_with_drafter(prompt, most, stop_ids, sampling()))

    answer(given[0], 0, min(_WARM_UP_TOKENS, settings.max_new_tokens))  # what the first calls of a process cost is not counted
    pairs = []
    for index, prompt in enumerate(given):
        pairs.append(answer(prompt, index, settings.max_new_tokens))
        tell(pairs[-1], len(given))
    return _document(settings, digest, drafter.spec.block_size, pairs)


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt in a file or of each held-out document in shards; raises DataError."""
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise DataError(f"{path} cannot be read: {error}") from None
    if not is_folder:
        found = [_render(f"{path}: prompt {i}", tokenizer, messages) for i, messages in enumerate(prompts(path), 1)]
    else:
        shards = open_shards(path, "held_out")
        if shards.tokenizer_digest != tokenizer_digest(tokenizer):
            raise DataError(f"{path} was made with another vocabulary or chat template than the target's")
        found = [tokens[: int(np.argmax(mask))].tolist() for tokens, mask in map(shards.document, range(len(shards)))]
    if not found:
        raise DataError(f"{path}: there is no prompt here")
    return found


def ratio_interval(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of sum(parts) / sum(wholes) over independent pairs; None for fewer than two pairs.

    The linearised (Taylor) variance of a ratio estimator: Cochran, Sampling Techniques, 6.4; normal quantiles.
    """
    count, total = len(parts), sum(wholes)
    if count < 2 or total <= 0:
        return None
    ratio = sum(parts) / total
    squares = sum((part - ratio * whole) ** 2 for part, whole in zip(parts, wholes, strict=True))
    half = _NORMAL_95 * math.sqrt(squares * count / (count - 1)) / total
    return ratio - half, ratio + half


def by_position(responses: Sequence[Response], block_size: int) -> list[dict[str, Any]]:
    """How often each block position was accepted, of the times that it lay inside the response."""
    offered, accepted = [0] * block_size, [0] * block_size
    for response in responses:
        left = len(response.tokens) - 1  # the first token is no draft
        for verification in response.rounds:
            for k in range(1, min(verification.num_drafted, left) + 1):
                offered[k] += 1
                accepted[k] += k <= verification.num_accepted
            left -= verification.num_produced
    return [
        {"position": k, "offered": offered[k], "accepted": accepted[k], "share": _ratio(accepted[k], offered[k])}
        for k in range(1, block_size)
    ]


def _document(settings: Settings, digest: str, block_size: int, pairs: Sequence[Pair]) -> dict[str, Any]:
    drafted, plain = [pair.drafted for pair in pairs], [pair.plain for pair in pairs]
    tokens = [len(response.tokens) - 1 for response in drafted]
    verifications = [len(response.rounds) for response in drafted]
    used = [(t, v) for t, v in zip(tokens, verifications, strict=True) if v]
    interval = ratio_interval([t for t, _ in used], [v for _, v in used])
    speeds = {name: _tokens_per_s(group) for name, group in (("plain", plain), ("speculative", drafted))}
    greedy = settings.temperature <= 0
    return {
        "schema": 1,
        "checkpoint": str(settings.checkpoint),
        "checkpoint_sha256": digest,
        "target": asdict(settings.target),
        "prompts": {"source": str(settings.prompts), "count": len(pairs)},
        "device": settings.device,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "max_new_tokens": settings.max_new_tokens,
        "block_size": block_size,
        "acceptance_length": {
            "mean": _ratio(sum(tokens), sum(verifications)),
            "interval_95": interval,
            "tokens": sum(tokens),
            "verifications": sum(verifications),
            "prompts": len(used),
        },
        "accepted_by_position": by_position(drafted, block_size),
        "tokens_per_s": speeds,
        "speedup": _ratio(speeds["speculative"] or 0, speeds["plain"] or 0),
        "prefill_s": {"plain": sum(r.prefill_s for r in plain), "speculative": sum(r.prefill_s for r in drafted)},
        "ended": sum(response.ended for response in drafted),
        "equal_to_plain": sum(pair.plain.tokens == pair.drafted.tokens for pair in pairs) if greedy else None,
    }


def _tokens_per_s(responses: Sequence[Response]) -> float | None:
    """After the prefill, which gives the first token."""
    return _ratio(sum(len(response.tokens) - 1 for response in responses), sum(r.decode_s for r in responses))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _render(where: str, tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    if tokenizer.chat_template:
        try:
            text = rendered(tokenizer, messages, tokenize=False, add_generation_prompt=True)
        except Dropped as reason:
            raise DataError(f"{where}: the target's chat template refuses it: {reason.__cause__}") from reason
    else:
        text = "\n".join(message["content"] for message in messages)
    ids: list[int] = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    return ids


def _check_prompt(where: str, prompt: Collection[int], vocab_size: int) -> None:
    if not prompt:
        raise DataError(f"{where} has no token")
    if max(prompt) >= vocab_size:
        raise DataError(f"{where} holds token id {max(prompt)}, the target's vocabulary has {vocab_size}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.evaluate", description="Measure a drafter by lossless speculative decoding."
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--target", required=True, help="folder or hub id of the target model")
    parser.add_argument("--gguf-file", help="name of a GGUF file inside the target's folder")
    parser.add_argument(
        "--prompts", type=Path, required=True, help="JSONL file of prompts or chats, or a folder of token shards"
    )
    parser.add_argument("--limit", type=int, help="take only the first LIMIT prompts")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest response (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help=f"{TEMPERATURES}; 0 is greedy (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of both models (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N (%(default)s)")
    parser.add_argument("--root", type=Path, default=Path(), help="folder that relative paths start from (here)")
    parser.add_argument("--output", type=Path, help="folder for events.jsonl and evaluation.json")
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1 or args.seed < 0 or (args.limit is not None and args.limit < 1):
        parser.error("--max-new-tokens and --limit must be at least 1, --seed at least 0")
    if not is_temperature(args.temperature):
        parser.error(f"--temperature must be {TEMPERATURES}, got {args.temperature}")
    dtype: Dtype = args.dtype
    settings = Settings(
        checkpoint=args.checkpoint,
        target=TargetConfig(path=args.target, gguf_file=args.gguf_file, dtype=dtype),
        prompts=args.prompts,
        limit=args.limit,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        device=args.device,
        root=args.root,
    )
    try:
        ticker = _Ticker()
        document = evaluate(settings, ticker) if args.output is None else _recorded(settings, args.output, ticker)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


class _Ticker:
    """A line on stderr, not too often: how far it is, and what has come out so far."""

    def __init__(self) -> None:
        self._next = time.monotonic()
        self._done = self._tokens = self._verifications = 0

    def __call__(self, pair: Pair, count: int) -> None:
        self._done += 1
        self._tokens += len(pair.drafted.tokens) - 1
        self._verifications += len(pair.drafted.rounds)
        if time.monotonic() < self._next and self._done < count:
            return
        self._next = time.monotonic() + _TICK_S
        length = f": {self._tokens / self._verifications:.2f} tokens a verification" if self._verifications else ""
        sys.stderr.write(f"answered {self._done} of {count} prompts{length}\n")


def _recorded(settings: Settings, folder: Path, ticker: _Ticker) -> dict[str, Any]:
    """`evaluate`, told in events, its document kept."""
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(alone_in(folder))
            if (folder / "evaluation.json").exists():
                raise ConfigError(f"--output {folder} has an evaluation.json already; remove it or choose another --output")
            set_aside(folder / "events.jsonl", free_number(folder))
            log = held.enter_context(contextlib.closing(EventLog(folder / "events.jsonl")))
        except OSError as error:
            raise ConfigError(f"--output {folder} cannot be used: {error}") from None
        log.write(STARTED, checkpoint=str(settings.checkpoint), prompts=str(settings.prompts))

        def tell(pair: Pair, count: int) -> None:
            log.write(PROMPT, **_told(pair, settings))
            ticker(pair, count)

        try:
            document = evaluate(settings, tell)
            _keep(document, folder)
            log.write(FINISHED, **document)
        except BaseException as error:
            with contextlib.suppress(TrainerError):  # the first cause counts, not a disk that is full by now
                log.write(FAILED, error=sentence(error))
            raise
    return document


def _keep(document: dict[str, Any], folder: Path) -> None:
    partial = folder / ".evaluation.json.partial"
    try:
        partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / "evaluation.json")
    except OSError as error:
        raise ConfigError(f"--output {folder} cannot be used: {error}") from None


def _told(pair: Pair, settings: Settings) -> dict[str, Any]:
    return {
        "tokens": len(pair.drafted.tokens),
        "verifications": len(pair.drafted.rounds),
        "plain_s": pair.plain.decode_s,
        "speculative_s": pair.drafted.decode_s,
        "equal_to_plain": pair.plain.tokens == pair.drafted.tokens if settings.temperature <= 0 else None,
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # an exit is told, a death is not
    sys.exit(main())
