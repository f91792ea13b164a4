"""What a drafter learns between two log lines, summed on its device and read once.

The loss is of every batch, accuracy and acceptance are of the batches that were measured. `StepMetrics` belongs to one drafter
thread and never synchronises in `add` and `measure`; `read` waits for the device and gives plain numbers, `Totals`, which add
up over drafters. Shape legend: `trainer.batch`; position lists have K-1 entries, slot 1 first.
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
    draft_tokens: float
    """Labelled slots of all batches; what follows is of the measured ones."""
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
            self.draft_tokens + other.draft_tokens,
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
        self._losses = torch.zeros(3, dtype=torch.float64, device=device)
        self._blocks = torch.zeros(2, dtype=torch.float64, device=device)
        self._positions = torch.zeros(2, block_size - 1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, parts: LossParts, weights_BNK: Tensor) -> None:
        """Add one batch's loss."""
        labelled_BNJ = weights_BNK[:, :, 1:] > 0
        self._losses += torch.stack([parts.loss_sum.double(), parts.weight_sum, labelled_BNJ.sum()])

    @torch.no_grad()
    def measure(self, parts: LossParts, weights_BNK: Tensor, anchor_valid_BN: Tensor) -> None:
        """Add one batch's accuracy and acceptance."""
        labelled_BNJ = weights_BNK[:, :, 1:] > 0
        right_BNJ = parts.correct[:, :, 1:] & labelled_BNJ
        self._blocks += torch.stack([anchor_valid_BN.sum(), right_BNJ.cumprod(dim=-1).sum()])
        self._positions += torch.stack([right_BNJ.sum(dim=(0, 1)), labelled_BNJ.sum(dim=(0, 1))])

    def read(self) -> Totals:
        """What came since the last `read`; waits for the device."""
        losses, blocks, (correct, counted) = (sums.tolist() for sums in self._sums)
        for sums in self._sums:
            sums.zero_()
        return Totals(*losses, *blocks, tuple(correct), tuple(counted))

    @property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._losses, self._blocks, self._positions


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
