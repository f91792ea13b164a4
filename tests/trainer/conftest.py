"""Small batches, drafters and targets for every trainer test."""

from collections.abc import Callable, Sequence

import pytest
import torch

from trainer.batch import NO_DOCUMENT, Batch
from trainer.model.draft import DraftModel, DraftSpec, TargetInfo

VOCABULARY = 64


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return _make_batch


@pytest.fixture
def make_spec() -> Callable[..., DraftSpec]:
    return _make_spec


@pytest.fixture
def make_drafter() -> Callable[..., DraftModel]:
    return _make_drafter


@pytest.fixture
def target_info() -> TargetInfo:
    return TargetInfo(
        model_type="llama",
        num_layers=8,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.02,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )


def _make_batch(
    rows: Sequence[Sequence[int]], anchors: Sequence[Sequence[int]], *, num_slots: int, num_anchors: int, prompt: int = 2
) -> Batch:
    """Rows of documents of these lengths with random tokens, responses after `prompt` tokens, and the given anchors."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(rows), num_slots)
    tokens = torch.randint(3, VOCABULARY - 1, shape, generator=generator)
    positions = torch.zeros(shape, dtype=torch.int64)
    doc_ids = torch.full(shape, NO_DOCUMENT, dtype=torch.int32)
    for b, lengths in enumerate(rows):
        start = 0
        for document, length in enumerate(lengths):
            doc_ids[b, start : start + length] = document
            positions[b, start : start + length] = torch.arange(length)
            start += length
    in_document = doc_ids != NO_DOCUMENT
    padded = [[*given, *[0] * (num_anchors - len(given))] for given in anchors]
    valid = [[n < len(given) for n in range(num_anchors)] for given in anchors]
    return Batch(
        index=0,
        tokens=tokens * in_document,
        positions=positions,
        doc_ids=doc_ids,
        loss_mask=in_document & (positions >= prompt),
        anchors=torch.tensor(padded),
        anchor_valid=torch.tensor(valid),
    )


def _make_spec(**changes: object) -> DraftSpec:
    values: dict[str, object] = {
        "num_layers": 2,
        "block_size": 4,
        "target_layer_ids": (1, 3, 5),
        "mask_token_id": VOCABULARY - 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "dtype": torch.float32,
    }
    return DraftSpec(**(values | changes))  # type: ignore[arg-type]


def _make_drafter(spec: DraftSpec, seed: int = 0) -> DraftModel:
    """A drafter far from its initial state: no weight is small and no norm is one, so that nothing cancels."""
    model = DraftModel(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.3, generator=generator)
    return model
