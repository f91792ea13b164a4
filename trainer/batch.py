"""What crosses the channels, and the shape legend that model/, loss.py and anchors.py use in their suffixes.

    B rows of a batch        S context slots of a row       N anchors of a row        K block positions
    Q = N*K draft slots      L tapped layers                D target width            E drafter width
    H heads                  V vocabulary

A batch is built by the BatchPrefetcher and not changed afterwards. Rows without documents ("invalid rows") are all padding: no
document, no loss, no anchor; they carry zero weight.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

NO_DOCUMENT = -1
"""Document id of padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Packed rows of one static shape, with the blocks that are trained on."""

    index: int
    """Position in the run: drafter `index % M` trains on it in step `index // M`."""
    tokens: Tensor
    """[B, S] int64; 0 in padding."""
    positions: Tensor
    """[B, S] int64; restart at 0 in each document."""
    doc_ids: Tensor
    """[B, S] int32; ascending from 0 in a row, NO_DOCUMENT in padding."""
    loss_mask: Tensor
    """[B, S] bool; True on response tokens."""
    anchors: Tensor
    """[B, N] int64 slots of the row, ascending; 0 where not valid."""
    anchor_valid: Tensor
    """[B, N] bool; valid ones come first."""
    held_out: bool = False
    """Whether drafter 0 only looks at it, and nobody learns from it."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; itself where it already lies there."""
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureBatch:
    """A batch and what the target model made of it."""

    batch: Batch
    context_features: Tensor
    """[B, S, L*D]: outputs of the tapped layers, concatenated in `target_layer_ids` order."""
    target_states: Tensor | None = None
    """[B, S, D]: what the target's head reads, if the drafter learns from its logits."""
