import threading

import pytest
import torch

from trainer.averaging import DrafterSum
from trainer.errors import WorkerError


def in_threads(count, work):
    """`work(rank)` in a thread each; what they returned or raised, by rank."""
    results = [None] * count

    def run(rank):
        try:
            results[rank] = work(rank)
        except Exception as error:  # noqa: BLE001
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_everyone_gets_the_same_bits_of_the_sum_in_place():
    meeting = DrafterSum(["cpu"] * 3, timeout_s=20)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1000, generator=generator) for _ in range(3)]
    expected = parts[0] + parts[1] + parts[2]
    scalars = [torch.tensor([float(rank), 1.0]) for rank in range(3)]

    def work(rank):
        meeting.connect(rank)
        for _ in range(2):
            meeting.sum(rank, parts[rank], scalars[rank])
        meeting.check_equal(rank, parts[rank].view(torch.int32).sum())
        meeting.disconnect(rank)

    assert in_threads(3, work) == [None] * 3
    torch.testing.assert_close(parts[0], 3 * expected)
    assert all(torch.equal(part, parts[0]) for part in parts)
    assert all(scalar.tolist() == [9.0, 9.0] for scalar in scalars)
    assert all(seconds > 0 for seconds in meeting.wait_s)


def test_a_lone_drafter_meets_nobody():
    meeting, grad = DrafterSum(["cpu"], timeout_s=0.01), torch.ones(3)
    meeting.sum(0, grad)
    assert grad.tolist() == [1, 1, 1]


def test_who_waits_is_told_when_the_others_do_not_come_or_the_run_ends():
    with pytest.raises(WorkerError, match=r"draft-1: the other drafters did not come within 0\.01 s"):
        DrafterSum(["cpu", "cpu"], timeout_s=0.01).sum(1, torch.ones(1))
    meeting = DrafterSum(["cpu", "cpu"], timeout_s=20)
    meeting.abort()
    with pytest.raises(WorkerError):
        meeting.sum(0, torch.ones(1))
