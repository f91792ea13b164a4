"""SpecForge's own loss and mask on the shards, batches, anchors, steps and learning rates of a run of ours, to compare with.

    python experiments/baseline.py RUN_FOLDER/config.json [--steps N] > baseline.jsonl

SpecForge's training wrapper comes out of its wheel and is called, not copied. It does not pack, so each document of a packed
row becomes a row of its own with its anchors; the target's features, rounded as for a run of ours, and the optimizer are ours.
Prints an event a line: `step` every `run.log_every` steps, and `validation` every `run.validate_every`, on the same held-out
batches that a run looks at. One thread, no drafter compiled or captured: its speed says nothing.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from trainer.batch import NO_DOCUMENT, Batch, FeatureBatch
from trainer.checkpoint import Staging, save_checkpoint
from trainer.config import TrainConfig
from trainer.errors import ConfigError, TrainerError
from trainer.loss import blocks_loss
from trainer.metrics import StepMetrics
from trainer.model.draft import copy_draft
from trainer.optim import DraftOptimizer
from trainer.packing import batches
from trainer.pipeline import Loaded, load_all


def documents_of(batch: Batch, features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, loss mask, features, anchors and their validity, a document a row, those without an anchor left out.

    The batch has an anchor.
    """
    rows: list[tuple[Tensor, ...]] = []
    for r, ids in enumerate(batch.doc_ids):
        for document in ids[ids != NO_DOCUMENT].unique().tolist():
            slots = (ids == document).nonzero()[:, 0]
            mine = batch.anchor_valid[r] & (ids[batch.anchors[r]] == document)
            if mine.any():
                anchors = batch.anchors[r][mine] - slots[0]
                parts = (batch.tokens[r, slots], batch.loss_mask[r, slots].float(), features[r, slots], anchors)
                rows.append((*parts, torch.ones_like(anchors, dtype=torch.bool)))
    tokens, masks, states, anchors, valid = (pad_sequence(list(column), batch_first=True) for column in zip(*rows, strict=True))
    return tokens, masks, states, anchors, valid


def wrapped(config: TrainConfig, loaded: Loaded, device: torch.device) -> OnlineDFlashModel:
    """SpecForge's model with our first weights, in fp32, and its wrapper with what `config` says."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(Path(folder), 0, Staging(loaded.initial), loaded.info)
        draft = DFlashDraftModel.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    draft.load_state_dict(loaded.initial.state_dict())  # the checkpoint rounds
    embedding, head = loaded.targets[config.pipeline.target_devices[0]].ends(device, loaded.spec.dtype)
    embed_tokens = torch.nn.Embedding.from_pretrained(embedding)
    lm_head = torch.nn.Linear(1, 1, bias=False)
    lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    by_confidence = config.optim.loss_weights == "dpace"
    return OnlineDFlashModel(
        draft.to(device),
        lm_head,
        embed_tokens,
        mask_token_id=loaded.spec.mask_token_id,
        block_size=loaded.spec.block_size,
        attention_backend="sdpa",
        loss_decay_gamma=None if by_confidence else config.loss_gamma,
        loss_type="dpace" if by_confidence else "dflash",
    )


def train(config: TrainConfig, loaded: Loaded, steps: int) -> Iterator[dict[str, Any]]:
    """The events of `steps` steps, each with as many batches as the run has drafters; raises ConfigError for what it lacks."""
    if config.draft.feature_noise:
        raise ConfigError(f"SpecForge has no draft.feature_noise; it must be 0, got {config.draft.feature_noise}")
    if config.optim.loss_labels != "tokens":
        raise ConfigError(f"SpecForge has no other labels; optim.loss_labels must be tokens, got {config.optim.loss_labels}")
    device = torch.device(config.pipeline.target_devices[0])
    target, num_batches = loaded.targets[str(device)], len(config.pipeline.drafter_devices)
    judge = wrapped(config, loaded, device)
    optimizer = DraftOptimizer(judge.draft_model, config)
    precision = torch.autocast(device.type, loaded.spec.dtype, enabled=loaded.spec.dtype != torch.float32)
    stream = batches(loaded.shards, config)
    for step in range(steps):
        optimizer.zero_grad()
        sums = torch.zeros(2, device=device)
        for batch in (next(stream).to(device) for _ in range(num_batches)):
            if not batch.anchor_valid.any():
                continue
            tokens, mask, features, anchors, valid = documents_of(batch, target.context_features(batch))
            judge._sample_anchor_positions = types.MethodType(lambda *_, given=(anchors, valid): given, judge)
            with precision, sdpa_kernel(SDPBackend.MATH):  # of blocks that see nothing, other kernels make NaN going back
                _, _, told = judge(tokens, features, mask)
                loss, weight = told["loss_terms"]
                loss.backward()
            sums += torch.stack([loss.detach(), weight]).float()
        optimizer.step(step, sums[0], sums[1])
        if config.logs_after(step + 1):
            optimizer.check()
            yield {"event": "step", "step": step + 1, "loss": (sums[0] / sums[1]).item()}
        if config.validates_after(step + 1) or step + 1 == steps:
            optimizer.check()
            yield {"event": "validation", "step": step + 1} | held_out(config, loaded, judge, device)


@torch.no_grad()
def held_out(config: TrainConfig, loaded: Loaded, judge: OnlineDFlashModel, device: torch.device) -> dict[str, Any]:
    """What our model makes of the held-out split with these weights."""
    if loaded.held_out is None:
        return {}
    model = copy_draft(loaded.initial, device)
    model.load_state_dict(judge.draft_model.state_dict())
    target = loaded.targets[str(device)]
    metrics, ends = StepMetrics(loaded.spec.block_size, device), target.ends(device, loaded.spec.dtype)
    stream = batches(loaded.held_out, config)
    for batch in (next(stream).to(device) for _ in range(config.run.validate_batches)):
        features = FeatureBatch(batch=batch, context_features=target.context_features(batch))
        loss, weights = blocks_loss(config, model, ends, features, eager=True)
        metrics.add(loss, weights)
        metrics.measure(loss, weights, batch.anchor_valid)
    totals = metrics.read()
    return {"loss": totals.loss, "accuracy": totals.accuracy, "acceptance_length": totals.acceptance_length}


def main() -> None:
    """Print the events."""
    parser = argparse.ArgumentParser(description="SpecForge's loss and mask on a run's batches.")
    parser.add_argument("config", type=Path, help="config.json of a run")
    parser.add_argument("--steps", type=int, help="fewer steps than the run's; its schedule stays")
    args = parser.parse_args()
    try:
        config = TrainConfig.from_dict(json.loads(args.config.read_text(encoding="utf-8")))
        with contextlib.suppress(BrokenPipeError):
            for event in train(config, load_all(config), args.steps or config.run.steps):
                print(json.dumps(event), flush=True)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
