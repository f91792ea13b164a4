import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from trainer.channel import Channel, EndOfChannel
from trainer.config import TrainConfig
from trainer.graphs import DeviceClock
from trainer.model.draft import TargetInfo, resolve_draft
from trainer.proof import CEILING_FILE, Proof, draft_flop, target_flop, waits
from trainer.wiring import wire

QWEN3_8B = TargetInfo(
    model_type="qwen3",
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    vocab_size=151936,
    max_position_embeddings=40960,
    initializer_range=0.02,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


def config(root=".", optim=None, **batch):
    return TrainConfig.from_dict(
        {
            "target": {"path": "t"},
            "data": {"path": "d"},
            "batch": batch,
            "optim": optim or {},
            "pipeline": {"target_devices": ["cpu"], "drafter_devices": ["cpu", "cpu"], "graphs": "none"},
            "run": {"root": str(root)},
        }
    )


def test_flop_of_qwen3_8b():
    # 4 rows of 3072 slots, 512 blocks of 16, counted elsewhere: 296 TF for the drafter, of which 14 are scores of attention and
    # 5 logits of slot 0, and 184 TF for all 36 layers of the target, of which 11 are scores; 34 layers are run
    four_rows = config(rows=4, row_tokens=3072)
    spec = resolve_draft(four_rows.draft, QWEN3_8B, 151669)
    assert draft_flop(four_rows, spec, 151936) == pytest.approx(277e12, rel=0.02)
    assert target_flop(four_rows, spec, QWEN3_8B) == pytest.approx(173e12 * 34 / 36, rel=0.02)
    distilled = config(rows=4, row_tokens=3072, optim={"loss_labels": "logits"})  # all layers, and the head for the labels
    assert target_flop(distilled, spec, QWEN3_8B) == pytest.approx(173e12, rel=0.02)
    labels = draft_flop(distilled, spec, 151936) - draft_flop(four_rows, spec, 151936)
    assert labels == pytest.approx(2 * 4 * 512 * 15 * 4096 * 151936)


def test_rates_and_fractions_count_from_the_mark():
    run = config(rows=1, row_tokens=64)
    wiring = wire(run, on_open=lambda: None)
    proof = Proof(run, wiring, resolve_draft(run.draft, QWEN3_8B, 0), QWEN3_8B)
    with pytest.raises(TimeoutError):
        wiring.batches[0].receive(timeout_s=0.05)
    began = time.monotonic()
    proof.mark()
    with pytest.raises(TimeoutError):
        wiring.features[0, 1].receive(timeout_s=0.05)
    time.sleep(0.05)
    wiring.facts["draft-0"].captures += 1
    read = proof.read(steps=3, context_tokens=30, draft_tokens=60)
    seconds = time.monotonic() - began
    proof.close()
    assert (read["captures_before_gate"], read["captures_after_gate"], read["recompiles"]) == (0, 1, 0)
    assert read["stages"]["target-0"]["waits"] == {"in": 0, "out": 0}
    assert 0.05 / seconds <= read["stages"]["draft-1"]["waits"]["in"] < 1
    assert read["context_tokens_per_s"] == pytest.approx(read["steps_per_s"] * 10)
    assert read["draft_tokens_per_s"] == pytest.approx(read["steps_per_s"] * 20)
    assert read["gpus"] == {}
    assert read["stages"]["draft-0"]["steady_step_s"] is None, "unknown is not zero"
    json.dumps(read)


def test_nobody_waits_for_more_than_all_the_time_however_slowly_it_is_read(monkeypatch):
    wiring = wire(config(rows=1, row_tokens=64), on_open=lambda: None)
    statistics = Channel.statistics

    def slow(channel):
        time.sleep(0.02)
        return statistics(channel)

    channel = wiring.features[0, 1]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(channel.receive, timeout_s=60)
        while channel.statistics().receive_wait_s == 0:
            time.sleep(0.001)
        before = waits(wiring)
        monkeypatch.setattr(Channel, "statistics", slow)
        share = waits(wiring).shares_since(before)["draft-1"]["in"]
        channel.close()
    assert isinstance(waiting.exception(), EndOfChannel)
    assert 0.1 < share <= 1


def test_a_stage_is_busy_for_a_share_of_the_time_that_its_spans_were_counted_in():
    run = config(rows=1, row_tokens=64)
    wiring = wire(run, on_open=lambda: None)
    clock = wiring.facts["draft-0"].clock = DeviceClock(torch.device("cpu"))
    proof = Proof(run, wiring, resolve_draft(run.draft, QWEN3_8B, 0), QWEN3_8B)
    assert proof.read(steps=1, context_tokens=1, draft_tokens=1)["stages"]["draft-0"]["busy"] is None, "unknown is not zero"
    with clock.span():
        time.sleep(0.02)
    began = time.monotonic()
    proof.mark()
    for _ in range(3):
        with clock.span():
            time.sleep(0.02)
    seconds = time.monotonic() - began
    time.sleep(0.1)  # what comes after is counted with the next span
    stage = proof.read(steps=3, context_tokens=1, draft_tokens=1)["stages"]["draft-0"]
    proof.close()
    assert 0.06 / seconds <= stage["busy"] <= 1
    assert stage["steady_step_s"] >= 0.02


def test_a_recompilation_is_counted():
    run = config(rows=1, row_tokens=64)
    proof = Proof(run, wire(run, on_open=lambda: None), resolve_draft(run.draft, QWEN3_8B, 0), QWEN3_8B)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    read = proof.read(steps=1, context_tokens=1, draft_tokens=1)
    proof.close()
    assert read["recompiles"] == 1


def test_what_the_sleeper_keeps_does_not_grow_for_ever():
    run = config(rows=1, row_tokens=64)
    proof = Proof(run, wire(run, on_open=lambda: None), resolve_draft(run.draft, QWEN3_8B, 0), QWEN3_8B)
    proof.close()
    proof._sleeper._late_ms.extend([100.0] * 5000)
    proof._sleeper._late_ms.extend([1.0] * 5000)
    assert len(proof._sleeper._late_ms) == 5000
    assert proof.read(steps=1, context_tokens=1, draft_tokens=1)["sleeper_p99_ms"] == 1.0


def test_rates_of_no_steps_are_not_known(monkeypatch):
    run = config(rows=1, row_tokens=64)
    monkeypatch.setattr("trainer.proof._gpus", lambda _: ["cuda:0"])
    memory = {"allocs": 0, "retries": 0, "reserved": 0, "peak": 0}
    monkeypatch.setattr("trainer.proof._allocations", lambda _: memory)
    monkeypatch.setattr("trainer.proof._ceiling", lambda _: 700.0)
    proof = Proof(run, wire(run, on_open=lambda: None), resolve_draft(run.draft, QWEN3_8B, 0), QWEN3_8B)
    read = proof.read(steps=0, context_tokens=0, draft_tokens=0)
    proof.close()
    assert (read["steps_per_s"], read["context_tokens_per_s"], read["draft_tokens_per_s"]) == (None, None, None)
    assert (read["gpus"]["cuda:0"]["tflops"], read["gpus"]["cuda:0"]["ceiling_share"]) == (None, None)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ('{"matmul_tflops": 8}', 0.5),
        ("[]", None),
        ("{}", None),
        ("{", None),
        ('{"matmul_tflops": null}', None),
        ('{"matmul_tflops": 1%s}' % ("0" * 400), None),
        ("[" * 100_000, None),
    ],
    ids=["good", "list", "empty", "half", "null", "huge", "deep"],
)
def test_a_damaged_ceiling_is_an_unknown_one(tmp_path, monkeypatch, text, share):
    run = config(tmp_path, rows=1, row_tokens=64)
    (tmp_path / CEILING_FILE).write_text(text)
    monkeypatch.setattr("trainer.proof._allocations", lambda _: {"allocs": 0, "retries": 0, "reserved": 0, "peak": 0})
    proof = Proof(run, wire(run, on_open=lambda: None), resolve_draft(run.draft, QWEN3_8B, 0), QWEN3_8B)
    proof.close()
    proof._memory = {"cpu": {"allocs": 0, "retries": 0}}
    assert proof._gpu("cpu", dict.fromkeys(proof._wiring.facts, 4 / 3))["ceiling_share"] == share
