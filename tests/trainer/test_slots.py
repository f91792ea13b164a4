import torch

from trainer.config import TrainConfig
from trainer.slots import PinnedStage, make_slot, tensors_of

CPU = torch.device("cpu")
CONFIG = TrainConfig.from_dict(
    {
        "target": {"path": "t"},
        "draft": {"num_anchors": 5, "block_size": 4},
        "data": {"path": "d"},
        "batch": {"rows": 2, "row_tokens": 18},
        "pipeline": {"target_devices": ["cpu"], "drafter_devices": ["cpu"], "graphs": "none"},
    }
)


def test_a_slot_takes_a_batch_and_another_slot_without_moving(make_batch):
    batch = make_batch([[9, 7], [5]], [[2, 3], [1]], num_slots=18, num_anchors=5)
    first, second = (make_slot(CONFIG, 3, 2, CPU) for _ in range(2))
    addresses = [tensor.data_ptr() for tensor in second.tensors]
    PinnedStage(CONFIG, CPU).load(batch, first.features.batch)
    first.features.context_features.fill_(3)
    second.copy_from(first)
    for mine, theirs in zip(tensors_of(second.features.batch), tensors_of(batch), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    assert (second.features.context_features == 3).all()
    assert second.features.context_features.dtype == torch.bfloat16
    assert [tensor.data_ptr() for tensor in second.tensors] == addresses


def test_marks_on_the_cpu_are_no_obstacle():
    slot = make_slot(CONFIG, 3, 2, CPU)
    for mark in (slot.filled, slot.free):
        mark.wait()
        mark.record()
        mark.synchronize()
