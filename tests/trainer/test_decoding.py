"""Speculative decoding is lossless: greedy to the token, sampled in distribution; z-lab's own loop is the judge."""

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dflash.model import DFlashDraftModel, dflash_generate
from torch import Tensor

from trainer.checkpoint import load_checkpoint
from trainer.decoding import Decoder, Sampling, rejection_sample
from trainer.model.target import target_info

STOP = {1}


def greedy() -> Sampling:
    return Sampling(0.0, torch.Generator())


@pytest.fixture
def drafter(trained: Any) -> Any:
    return load_checkpoint(trained.checkpoint, target_info(trained.model), torch.float32)


@pytest.fixture
def decoder(trained: Any, drafter: Any) -> Decoder:
    return Decoder(trained.model, 32, drafter)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_plain_decoding_is_hugging_faces_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.decoding._KEY_STEP", 8)
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 64}
    windows = {"llama": {}, "mistral": {"sliding_window": 6}}
    some = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}  # the first layer sees everything
    config = transformers.AutoConfig.for_model(kind, **shape, **heads, **windows.get(kind, some))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ours = Decoder(model, 32)
    for prompt in ([5], [7, 9, 11], list(range(20, 33))):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=1, pad_token_id=0)
        assert ours.decode(prompt, 16, STOP, greedy()).tokens == theirs[0, len(prompt) :].tolist()


def test_greedy_tokens_are_those_of_plain_decoding_and_z_labs_rounds_are_ours(
    trained: Any, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.decoding._KEY_STEP", 8)
    monkeypatch.setattr("dflash.model._cuda_time", time.perf_counter)  # it gives its rounds only with times taken on a GPU
    judge = DFlashDraftModel.from_pretrained(trained.checkpoint, dtype=torch.float32).eval()
    rounds = []
    for prompt in trained.prompts[:16]:
        plain = decoder.decode(prompt, 16, STOP, greedy())
        ours = decoder.decode_with_drafter(prompt, 16, STOP, greedy())
        theirs = dflash_generate(judge, trained.model, torch.tensor([prompt]), 16, list(STOP), return_stats=True)
        assert (ours.tokens, ours.ended) == (plain.tokens, plain.ended)
        assert theirs.output_ids[0, len(prompt) :].tolist() == ours.tokens
        assert theirs.acceptance_lengths == [verification.num_produced for verification in ours.rounds]
        rounds += ours.rounds
    assert {verification.num_accepted for verification in rounds} == {0, 1, 2, 3}  # else this would prove little


def test_a_sliding_drafter_is_decoded_as_z_lab_decodes_it(
    trained: Any, drafter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.model._cuda_time", time.perf_counter)
    config = json.loads((trained.checkpoint / "config.json").read_text())
    config |= {"layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((trained.checkpoint / "model.safetensors").read_bytes())
    sliding = load_checkpoint(tmp_path, target_info(trained.model), torch.float32)
    assert sliding.spec.layer_windows == (5,)
    narrow, wide = (Decoder(trained.model, 32, model) for model in (sliding, drafter))
    judge = DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rounds: dict[str, list[int]] = {"sliding": [], "full": []}
    for prompt in trained.prompts[:10]:
        ours = narrow.decode_with_drafter(prompt, 16, STOP, greedy())
        theirs = dflash_generate(judge, trained.model, torch.tensor([prompt]), 16, list(STOP), return_stats=True)
        assert theirs.output_ids[0, len(prompt) :].tolist() == ours.tokens
        assert theirs.acceptance_lengths == [verification.num_produced for verification in ours.rounds]
        rounds["sliding"] += theirs.acceptance_lengths
        rounds["full"] += [r.num_produced for r in wide.decode_with_drafter(prompt, 16, STOP, greedy()).rounds]
    assert rounds["sliding"] != rounds["full"]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5])
def test_no_response_grows_beyond_its_limit(trained: Any, decoder: Decoder, most: int) -> None:
    for prompt in trained.prompts[:6]:
        plain = decoder.decode(prompt, most, STOP, greedy())
        ours = decoder.decode_with_drafter(prompt, most, STOP, greedy())
        assert (ours.tokens, ours.ended) == (plain.tokens, plain.ended)
        assert 1 + sum(verification.num_produced for verification in ours.rounds) == len(ours.tokens)
        assert all(v.num_accepted <= min(v.num_drafted, v.num_produced) for v in ours.rounds)


def test_a_response_ends_with_the_first_stop_token_wherever_it_lies_in_a_block(trained: Any, decoder: Decoder) -> None:
    prompt = max(trained.prompts, key=lambda p: len(decoder.decode(p, 16, STOP, greedy()).tokens))
    full = decoder.decode(prompt, 16, STOP, greedy()).tokens
    for stop in list(dict.fromkeys(full))[:8]:
        ours = decoder.decode_with_drafter(prompt, 16, {stop}, greedy())
        assert ours.tokens == full[: full.index(stop) + 1]
        assert ours.ended
        assert sum(verification.num_produced for verification in ours.rounds) == len(ours.tokens) - 1


def test_equal_seeds_give_equal_responses(trained: Any, decoder: Decoder) -> None:
    for prompt in trained.prompts[:3]:
        first, second = (
            decoder.decode_with_drafter(prompt, 12, STOP, Sampling(0.8, torch.Generator().manual_seed(3))) for _ in range(2)
        )
        assert first.tokens == second.tokens


def chi_square_exceeds(counts: Mapping[Any, int], probabilities: Mapping[Any, float]) -> bool:
    """Whether Pearson's statistic is five standard deviations above what it is for these probabilities; rare cells are one."""
    total = sum(counts.values())
    cells = [(counts.get(key, 0), p * total) for key, p in probabilities.items() if p * total >= 5]
    seen, expected = total - sum(c for c, _ in cells), total - sum(e for _, e in cells)
    cells += [(seen, expected)] if expected > 1 else []
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    degrees = len(cells) - 1
    return statistic > degrees + 5 * (2 * degrees) ** 0.5


WORDS, DRAFTED, LENGTH = 4, 2, 3
Rejection = Callable[[Tensor, Tensor, Tensor, Sampling], tuple[Tensor, Tensor]]


def chain_counts(reject: Rejection) -> tuple[Counter[tuple[int, ...]], dict[tuple[int, ...], float]]:
    """Three tokens of a Markov chain, many times, drafted two at a time by somebody who knows little of it; and the truth."""
    generator = torch.Generator().manual_seed(0)
    chain = torch.softmax(torch.randn(WORDS, WORDS, generator=generator) * 1.5, -1)
    draft = torch.softmax(torch.randn(DRAFTED, WORDS, generator=generator), -1)
    sampling = Sampling(1.0, generator)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(1500):
        tokens = [0]
        while len(tokens) <= LENGTH:
            drafted = sampling.draw(draft)
            num_accepted, bonus = reject(chain[[tokens[-1], *drafted.tolist()]], draft, drafted, sampling)
            tokens += [*drafted[:num_accepted].tolist(), int(bonus)]
        counts[tuple(tokens[1 : LENGTH + 1])] += 1
    truth = {
        path: float(torch.stack([chain[a, b] for a, b in itertools.pairwise((0, *path))]).prod())
        for path in itertools.product(range(WORDS), repeat=LENGTH)
    }
    return counts, truth


def replaced_by_the_targets_choice(target: Tensor, draft: Tensor, drafted: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """A common mistake: what replaces a rejected token is drawn from the target instead of from what is left of it."""
    num_accepted, _ = rejection_sample(target, draft, drafted, sampling)
    return num_accepted, sampling.draw(target[num_accepted][None])[0]


def test_rejection_sampling_keeps_the_targets_distribution() -> None:
    assert not chi_square_exceeds(*chain_counts(rejection_sample))
    assert chi_square_exceeds(*chain_counts(replaced_by_the_targets_choice))


def test_what_is_drafted_with_the_targets_own_distribution_is_always_kept() -> None:
    sampling = Sampling(1.0, torch.Generator().manual_seed(0))
    target = torch.softmax(torch.randn(5, 8, generator=sampling.generator), -1)
    for _ in range(50):
        num_accepted, _ = rejection_sample(target, target[:4], sampling.draw(target[:4]), sampling)
        assert num_accepted == 4


@torch.inference_mode()
def test_sampled_responses_are_distributed_as_the_targets(trained: Any, decoder: Decoder) -> None:
    prompt, sampling = trained.prompts[0], Sampling(0.6, torch.Generator().manual_seed(0))

    def after(*tokens: int) -> Tensor:
        return sampling.probabilities(trained.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1])

    truth = {}
    for a, pa in enumerate(after().tolist()):
        if pa > 1e-3:
            truth |= {(a, b): pa * pb for b, pb in enumerate(after(a).tolist())}
    counts = Counter(tuple(decoder.decode_with_drafter(prompt, 2, set(), sampling).tokens) for _ in range(200))
    assert not chi_square_exceeds(counts, truth)
    assert chi_square_exceeds(Counter({(a, (b + 1) % 64): n for (a, b), n in counts.items()}), truth)
