"""The three stages, one function each.

    BatchPrefetcher --batches[t]--> TargetForwardLoop t --features[t, d]--> DrafterTrainLoop d --free[t, d]--> back to t

Batch i goes through target `i % T` to drafter `i % M`, which trains on it in step `i // M`; each channel has one sender and one
receiver, so batches arrive in order whichever target is faster, and what is on its way is bounded by the slots. Before the gate
opens, dry batches take the same way. A worker that fails says `Died` and leaves; waking the others is the supervisor's part.

Each function runs in a thread of its own: `prefetch-0`, `target-<t>`, `draft-<d>`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from trainer.batch import Batch
from trainer.channel import Channel, EndOfChannel
from trainer.drafter import Drafter
from trainer.forward import TargetForward
from trainer.model.target import TargetModel
from trainer.packing import blank_batch
from trainer.wiring import STALL_S, Saved, Wiring, Worker


def batch_prefetcher(
    worker: Worker, wiring: Wiring, source: Iterator[Batch], held_out: Callable[[], Iterator[Batch]] | None = None
) -> None:
    """BatchPrefetcher: deal the run's batches out to the targets, in turn; those `held_out` go to target 0 for drafter 0."""
    config, outs = wiring.config, wiring.batches
    num_drafters = len(config.pipeline.drafter_devices)
    first = next(source)  # before the gate, for a run that goes on packs again what was done
    wiring.captured.pass_through(worker.name, timeout_s=STALL_S)
    blank = blank_batch(config)
    for index in range(wiring.dry_batches):
        outs[index % len(outs)].send(dataclasses.replace(blank, index=index), timeout_s=STALL_S)
    wiring.gate.pass_through(worker.name, timeout_s=STALL_S)
    for index in range(wiring.first_step * num_drafters, config.run.steps * num_drafters):
        worker.step = index // num_drafters + 1
        batch = first if index == wiring.first_step * num_drafters else next(source)
        outs[index % len(outs)].send(batch, timeout_s=STALL_S)
        done, rest = divmod(index + 1, num_drafters)
        if held_out is not None and rest == 0 and config.validates_after(done):
            for look in itertools.islice(held_out(), config.run.validate_batches):
                outs[0].send(dataclasses.replace(look, held_out=True), timeout_s=STALL_S)
    for out in outs:
        out.close()


def target_forward_loop(worker: Worker, wiring: Wiring, rank: int, target: TargetModel) -> None:
    """TargetForwardLoop: give each batch its context features, and pass it on to the drafter that it is for."""
    num_drafters = len(wiring.config.pipeline.drafter_devices)
    inbox = wiring.batches[rank]

    def pass_on(batch: Batch) -> None:
        drafter = 0 if batch.held_out else batch.index % num_drafters
        wiring.features[rank, drafter].send(forward.fill(batch, drafter), timeout_s=STALL_S)

    with wiring.captured.turn(worker.name, timeout_s=STALL_S):
        forward = TargetForward(wiring, rank, target)
    worker.moves += 1
    wiring.captured.pass_through(worker.name, timeout_s=STALL_S)
    forward.connect()
    for _ in range(wiring.dry_batches // len(wiring.batches)):
        pass_on(inbox.receive(timeout_s=STALL_S))
    forward.reset()
    wiring.gate.pass_through(worker.name, timeout_s=STALL_S)
    while (batch := _next_batch(inbox)) is not None:
        if not batch.held_out:
            worker.step = batch.index // num_drafters + 1
        pass_on(batch)


def _next_batch(inbox: Channel[Batch]) -> Batch | None:
    try:
        return inbox.receive(timeout_s=STALL_S)
    except EndOfChannel:
        return None


def drafter_train_loop(worker: Worker, wiring: Wiring, rank: int, make: Callable[[], Drafter]) -> None:
    """DrafterTrainLoop: train the drafter that `make` builds, in step with the others; the first one writes the checkpoints."""
    run = wiring.config.run
    with wiring.captured.turn(worker.name, timeout_s=STALL_S):
        drafter = make()
    worker.moves += 1
    wiring.captured.pass_through(worker.name, timeout_s=STALL_S)
    drafter.connect()
    worker.moves += 1
    wiring.gate.pass_through(worker.name, timeout_s=STALL_S)
    for step in range(wiring.first_step, run.steps):
        worker.step = done = step + 1
        drafter.train(step)
        last = done == run.steps
        if wiring.config.logs_after(done):
            worker.mailbox.put(drafter.report(done))
        if rank == 0 and wiring.config.validates_after(done):
            for _ in range(run.validate_batches):
                drafter.look()
                worker.moves += 1
            worker.mailbox.put(drafter.validated(done))
        if last or done % run.checkpoint_every == 0:
            drafter.check_equal()
            if rank == 0 and (path := drafter.save(done)) is not None:
                worker.mailbox.put(Saved(done, path))
    wiring.drafter_sum.disconnect(rank)
