"""M drafters are one model: their gradients, losses and weights are summed each step, and all get the same bits.

A module of its own because it is the only place where drafter threads meet. Each enters with its own rank; drafter r sums the
r-th share of the flat gradients and writes it into everyone's, so the work is divided and the order of additions is fixed. A
barrier with a time-out stands before and after; `abort` breaks it.
"""

import threading
import time

import torch
from torch import Tensor

from trainer.errors import WorkerError


class DrafterSum:
    """The meeting point of `num_drafters` threads."""

    def __init__(self, num_drafters: int, *, timeout_s: float) -> None:
        """Nobody waits yet; a wait longer than `timeout_s` breaks the meeting for everyone."""
        self._num_drafters = num_drafters
        self._timeout_s = timeout_s
        self._barrier = threading.Barrier(num_drafters)
        self._shares: list[tuple[Tensor, ...]] = [()] * num_drafters
        self._scalars = [torch.empty(0)] * num_drafters
        self.wait_s = [0.0] * num_drafters
        """Seconds that each drafter has waited for the others."""

    def sum(self, rank: int, flat_grad: Tensor, scalars: Tensor) -> Tensor:
        """Turn `flat_grad`, in place, into its sum over all drafters; returns the sum of `scalars`.

        All drafters bring equal shapes. Raises WorkerError after `abort` or a time-out.
        """
        if self._num_drafters == 1:
            return scalars
        self._shares[rank] = flat_grad.tensor_split(self._num_drafters)
        self._scalars[rank] = scalars
        self._meet(rank, scalars.device)
        shares = [theirs[rank] for theirs in self._shares]
        total = _sum(shares, flat_grad.device)
        for share in shares:
            share.copy_(total)
        total_scalars = _sum(self._scalars, scalars.device)
        self._meet(rank, scalars.device)
        return total_scalars

    def check_equal(self, rank: int, checksum: Tensor) -> None:
        """Assert that every drafter brings the same `checksum`; raises like `sum`."""
        self._scalars[rank] = checksum.cpu()
        self._meet(rank, checksum.device)
        assert all(torch.equal(self._scalars[0], theirs) for theirs in self._scalars), "drafters are not bit-equal"
        self._meet(rank, checksum.device)

    def abort(self) -> None:
        """Break the meeting for everyone who waits or comes later."""
        self._barrier.abort()

    def _meet(self, rank: int, device: torch.device) -> None:
        if device.type == "cuda":  # the others read and write on streams of their own
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
        since = time.monotonic()
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:  # after an abort nobody reads this
            raise WorkerError(f"draft-{rank}: the other drafters did not come within {self._timeout_s:g} s") from None
        self.wait_s[rank] += time.monotonic() - since


def _sum(parts: list[Tensor], device: torch.device) -> Tensor:
    total = parts[0].to(device, copy=True)
    for part in parts[1:]:
        total += part.to(device)
    return total
