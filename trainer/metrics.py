"""What a drafter learns between two log lines, summed on its device and read once.

`StepMetrics` belongs to one drafter thread and never synchronises in `add`; `read` waits for the device and gives
plain numbers, `Totals`, which add up over drafters. Shape legend: `trainer.batch`; position lists have K-1 entries,
slot 1 first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.loss import LossParts


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over some steps and drafters; a ratio of nothing is None."""

    loss_sum: float
    weight_sum: float
    num_blocks: float
    num_accepted: float
    """Length of the run of right, labelled slots that a block starts with, summed over valid blocks."""
    correct: tuple[float, ...]
    counted: tuple[float, ...]
    """Labelled slots by position."""

    def __add__(self, other: "Totals") -> "Totals":
        """Sums over both."""
        return Totals(
            self.loss_sum + other.loss_sum,
            self.weight_sum + other.weight_sum,
            self.num_blocks + other.num_blocks,
            self.num_accepted + other.num_accepted,
            tuple(a + b for a, b in zip(self.correct, other.correct, strict=True)),
            tuple(a + b for a, b in zip(self.counted, other.counted, strict=True)),
        )

    @property
    def loss(self) -> float | None:
        """Weighted mean of the cross-entropy."""
        return _ratio(self.loss_sum, self.weight_sum)

    @property
    def accuracy(self) -> list[float | None]:
        """Share of right slots by position."""
        return [_ratio(right, all_) for right, all_ in zip(self.correct, self.counted, strict=True)]

    @property
    def acceptance_length(self) -> float | None:
        """Estimated from training blocks, bonus token included."""
        accepted = _ratio(self.num_accepted, self.num_blocks)
        return None if accepted is None else 1 + accepted


class StepMetrics:
    """Accumulates on one device."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        """All sums zero."""
        self._scalars = torch.zeros(4, dtype=torch.float64, device=device)
        self._positions = torch.zeros(2, block_size - 1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, parts: LossParts, weights_BNK: Tensor, anchor_valid_BN: Tensor) -> None:
        """Add one batch."""
        labelled_BNJ = weights_BNK[:, :, 1:] > 0
        right_BNJ = parts.correct[:, :, 1:] & labelled_BNJ
        num_accepted = right_BNJ.cumprod(dim=-1).sum()
        self._scalars += torch.stack([parts.loss_sum.double(), parts.weight_sum, anchor_valid_BN.sum(), num_accepted])
        self._positions += torch.stack([right_BNJ.sum(dim=(0, 1)), labelled_BNJ.sum(dim=(0, 1))])

    def read(self) -> Totals:
        """What was added since the last `read`; waits for the device."""
        scalars, (correct, counted) = self._scalars.tolist(), self._positions.tolist()
        self._scalars.zero_()
        self._positions.zero_()
        loss_sum, weight_sum, num_blocks, num_accepted = scalars
        return Totals(loss_sum, weight_sum, num_blocks, num_accepted, tuple(correct), tuple(counted))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
