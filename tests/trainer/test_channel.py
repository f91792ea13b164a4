import threading
from collections.abc import Callable

import pytest

from trainer.channel import BrokenResourceError, Channel, ClosedResourceError, EndOfChannel


class Outcome:
    """What a call in another thread came to."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.value: object = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            self.value = call()
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            self.error = error

    def join(self) -> "Outcome":
        self._thread.join(10)
        assert not self._thread.is_alive(), "the call still waits"
        return self


def waiting(channel: Channel[int], side: str) -> None:
    """Return once a thread waits on that side: its clock runs."""
    deadline = threading.Event()
    for _ in range(2000):
        first = getattr(channel.statistics(), side)
        deadline.wait(0.002)
        if getattr(channel.statistics(), side) > first:
            return
    raise AssertionError(f"nobody waits: {side}")


def test_items_arrive_in_order_and_the_end_follows_the_last() -> None:
    channel: Channel[int] = Channel("numbers", 2)
    sender = Outcome(lambda: ([channel.send(i, timeout_s=10) for i in range(100)], channel.close()))
    assert [channel.receive(timeout_s=10) for _ in range(100)] == list(range(100))
    with pytest.raises(EndOfChannel, match="numbers"):
        channel.receive(timeout_s=10)
    assert sender.join().error is None


def test_a_full_channel_holds_its_sender_until_there_is_room() -> None:
    channel: Channel[int] = Channel("numbers", 1)
    channel.send(1, timeout_s=0)
    sender = Outcome(lambda: channel.send(2, timeout_s=10))
    waiting(channel, "send_wait_s")
    assert channel.statistics().depth == 1
    assert channel.receive(timeout_s=0) == 1
    assert sender.join().error is None
    assert channel.receive(timeout_s=0) == 2


def test_waits_that_last_too_long_name_the_channel() -> None:
    channel: Channel[int] = Channel("numbers", 1)
    with pytest.raises(TimeoutError, match=r"numbers: nothing moved for 0\.01 s"):
        channel.receive(timeout_s=0.01)
    channel.send(1, timeout_s=0)
    with pytest.raises(TimeoutError, match="numbers"):
        channel.send(2, timeout_s=0.01)
    assert channel.statistics().receive_wait_s >= 0.01
    assert channel.statistics().send_wait_s >= 0.01


def test_abort_wakes_a_waiting_sender_with_the_first_cause() -> None:
    channel: Channel[int] = Channel("numbers", 1)
    channel.send(1, timeout_s=0)
    sender = Outcome(lambda: channel.send(2, timeout_s=10))
    waiting(channel, "send_wait_s")
    first = ValueError("first")
    channel.abort(first)
    channel.abort(ValueError("second"))
    error = sender.join().error
    assert isinstance(error, BrokenResourceError)
    assert error.__cause__ is first


def test_abort_wakes_a_waiting_receiver_and_drops_what_was_on_its_way() -> None:
    channel: Channel[int] = Channel("numbers", 1)
    receiver = Outcome(lambda: channel.receive(timeout_s=10))
    waiting(channel, "receive_wait_s")
    channel.abort(ValueError("cause"))
    assert isinstance(receiver.join().error, BrokenResourceError)

    full: Channel[int] = Channel("full", 1)
    full.send(1, timeout_s=0)
    full.close()
    full.abort(ValueError("cause"))
    with pytest.raises(BrokenResourceError):
        full.receive(timeout_s=0)


def test_close_wakes_a_waiting_receiver_and_ends_sending() -> None:
    channel: Channel[int] = Channel("numbers", 1)
    receiver = Outcome(lambda: channel.receive(timeout_s=10))
    waiting(channel, "receive_wait_s")
    channel.close()
    assert isinstance(receiver.join().error, EndOfChannel)
    with pytest.raises(ClosedResourceError, match="numbers"):
        channel.send(1, timeout_s=0)
