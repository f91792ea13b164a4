import threading
from collections.abc import Callable

import pytest

from trainer.gate import GateBrokenError, StartupGate


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def gate(log: list[str]) -> StartupGate:
    return StartupGate(["a", "b", "c"], on_open=lambda: log.append("open"))


@pytest.fixture
def start(gate: StartupGate, log: list[str]) -> Callable[[str], threading.Thread]:
    """Start a thread that passes the gate for one party and logs what came of it."""

    def go(party: str) -> None:
        try:
            gate.pass_through(party, timeout_s=10)
            log.append(party)
        except GateBrokenError as error:
            log.append(f"{party}: {error.__cause__}")

    def start(party: str) -> threading.Thread:
        thread = threading.Thread(target=go, args=(party,), daemon=True)
        thread.start()
        return thread

    return start


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_opens_with_the_last_before_anybody_passes(start: Callable[[str], threading.Thread], log: list[str]) -> None:
    early = [start("a"), start("b")]
    early[0].join(0.05)
    assert log == []
    join(*early, start("c"))
    assert log[0] == "open"
    assert sorted(log[1:]) == ["a", "b", "c"]


def test_the_first_failure_breaks_it_for_all(
    gate: StartupGate, start: Callable[[str], threading.Thread], log: list[str]
) -> None:
    waiting = start("a")
    gate.abort(ValueError("first"))
    gate.abort(ValueError("second"))
    join(waiting, start("b"), start("c"))
    assert sorted(log) == ["a: first", "b: first", "c: first"]


def test_parties_prepare_one_at_a_time(gate: StartupGate, log: list[str]) -> None:
    def prepare() -> None:
        with gate.turn("b", timeout_s=10):
            log.append("b prepares")

    other = threading.Thread(target=prepare, daemon=True)
    with gate.turn("a", timeout_s=10):
        other.start()
        other.join(0.05)
        log.append("a is ready")
        with (
            pytest.raises(TimeoutError, match=r"startup gate: a has been preparing for 0\.01 s"),
            gate.turn("c", timeout_s=0.01),
        ):
            pass
    join(other)
    assert log == ["a is ready", "b prepares"]


def test_who_waits_for_its_turn_is_woken_by_a_failure(gate: StartupGate) -> None:
    def prepare() -> None:
        with pytest.raises(GateBrokenError), gate.turn("b", timeout_s=60):
            pass

    other = threading.Thread(target=prepare, daemon=True)
    with gate.turn("a", timeout_s=10):
        other.start()
        other.join(0.05)
        gate.abort(ValueError("first"))
        join(other)


def test_an_open_gate_stays_open(start: Callable[[str], threading.Thread], gate: StartupGate, log: list[str]) -> None:
    join(*[start(party) for party in "abc"])
    gate.abort(ValueError("late"))
    assert sorted(log) == ["a", "b", "c", "open"]


def test_a_wait_that_lasts_too_long_names_who_is_missing(gate: StartupGate) -> None:
    with pytest.raises(TimeoutError, match=r"startup gate: b, c did not arrive within 0\.01 s"):
        gate.pass_through("a", timeout_s=0.01)


def test_a_wait_is_as_long_as_nothing_moves_however_many_come_first(
    start: Callable[[str], threading.Thread], gate: StartupGate, log: list[str]
) -> None:
    """Two that take half the time-out each, and a third that has then waited for longer than it."""
    timeout_s, pause = 6.0, threading.Event()

    def prepare(party: str, takes_s: float) -> None:
        with gate.turn(party, timeout_s=timeout_s):
            pause.wait(takes_s)
        gate.pass_through(party, timeout_s=timeout_s)
        log.append(party)

    spans = [("a", 0.53 * timeout_s), ("b", 0.53 * timeout_s), ("c", 0.0)]
    threads = [threading.Thread(target=prepare, args=span, daemon=True) for span in spans]
    for thread in threads:
        thread.start()
    join(*threads)
    assert sorted(log) == ["a", "b", "c", "open"]


def test_turns_go_in_order_whoever_comes_first(gate: StartupGate, log: list[str]) -> None:
    def prepare(party: str) -> None:
        with gate.turn(party, timeout_s=10):
            log.append(party)

    threads = [threading.Thread(target=prepare, args=(party,), daemon=True) for party in "cba"]
    for thread in threads:
        thread.start()
        thread.join(0.02)
    join(*threads)
    assert log == ["a", "b", "c"]


def test_nobody_prepares_after_one_has_failed(gate: StartupGate) -> None:
    with pytest.raises(ValueError, match="broken"), gate.turn("a", timeout_s=10):
        raise ValueError("broken")
    with pytest.raises(TimeoutError), gate.turn("b", timeout_s=0.01):
        pass
