"""M drafters are one model: their gradients, losses and weights are summed each step, and all get the same bits.

A module of its own because it is the only place where drafter threads meet. On each device the first drafter, the leader, adds
up what the others of its device bring, joins the leaders of other GPUs by NCCL, which allows one rank a GPU, and hands the sum
back; all in its own stream, ordered by marks. Host threads meet at a barrier before and after, with a time-out; `abort` breaks
it.

Source: NCCL in threads of one process needs a communicator for each thread; it stays outside CUDA graphs.
"""

import datetime
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import WorkerError
from trainer.slots import Mark


@dataclass(frozen=True, slots=True)
class _Share:
    """What a drafter brings, and where it gets the sum."""

    tensors: tuple[Tensor, ...]
    brought: Mark
    summed: Mark


class DrafterSum:
    """The meeting point of the drafters on `devices`, in the order of their ranks."""

    def __init__(self, devices: Sequence[str], *, timeout_s: float) -> None:
        """Nobody waits yet; a wait longer than `timeout_s` breaks the meeting for everyone."""
        self._devices = [torch.device(device) for device in devices]
        self._leaders = [devices.index(device) for device in dict.fromkeys(devices)]
        self._timeout_s = timeout_s
        self._barrier = threading.Barrier(len(devices))
        self._shares = [_Share((), Mark(device), Mark(device)) for device in self._devices]
        self._checksums = [torch.empty(0)] * len(devices)
        self._store = dist.HashStore()
        self._group: dict[int, Any] = {}
        self.wait_s = [0.0] * len(devices)
        """Seconds that each drafter has waited for the others."""

    def connect(self, rank: int) -> None:
        """Before the gate, once nobody captures any more: the leaders of several GPUs open their NCCL group."""
        if rank in self._leaders and len(self._leaders) > 1:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = datetime.timedelta(seconds=self._timeout_s)
            store = dist.PrefixStore("drafters", self._store)
            self._group[rank] = dist.ProcessGroupNCCL(store, self._leaders.index(rank), len(self._leaders), options)

    def disconnect(self, rank: int) -> None:
        """After the last step; waits for the group's other ranks."""
        if rank in self._group:
            self._group.pop(rank).shutdown()

    def sum(self, rank: int, *tensors: Tensor) -> None:
        """Turn `tensors`, in place, into their sums over all drafters; the current stream of a GPU waits, not the host.

        All drafters bring equal shapes. Raises WorkerError after `abort` or a time-out.
        """
        if len(self._devices) == 1:
            return
        mine = self._shares[rank] = _Share(tensors, self._shares[rank].brought, self._shares[rank].summed)
        mine.brought.record()
        self._meet(rank)
        if rank in self._leaders:
            self._lead(rank, mine)
        self._meet(rank)
        self._shares[self._leader_of(rank)].summed.wait()

    def check_equal(self, rank: int, checksum: Tensor) -> None:
        """Assert that every drafter brings the same `checksum`; waits for the device; raises like `sum`."""
        self._checksums[rank] = checksum.cpu()
        self._meet(rank)
        assert all(torch.equal(self._checksums[0], theirs) for theirs in self._checksums), "drafters are not bit-equal"
        self._meet(rank)

    def abort(self) -> None:
        """Break the meeting for everyone who waits or comes later."""
        self._barrier.abort()

    def _lead(self, leader: int, mine: _Share) -> None:
        """Sum the shares of the leader's device in the order of ranks, then over all devices, and hand the sum back."""
        others = [share for rank, share in enumerate(self._shares) if rank != leader and self._leader_of(rank) == leader]
        for other in others:
            other.brought.wait()
            for total, part in zip(mine.tensors, other.tensors, strict=True):
                total.add_(part)
        if leader in self._group:
            for total in mine.tensors:
                self._group[leader].allreduce([total]).wait()
        for other in others:
            for total, part in zip(mine.tensors, other.tensors, strict=True):
                part.copy_(total)
        mine.summed.record()

    def _leader_of(self, rank: int) -> int:
        return self._devices.index(self._devices[rank])

    def _meet(self, rank: int) -> None:
        since = time.monotonic()
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:  # after an abort nobody reads this
            raise WorkerError(f"draft-{rank}: the other drafters did not come within {self._timeout_s:g} s") from None
        self.wait_s[rank] += time.monotonic() - since
