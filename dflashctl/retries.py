"""`launch --retries N`: after a death that more tries can mend, what `launch --resume` would start, by itself.

A module of its own because it decides and stays, where `dflashctl.launch` starts and leaves. What is tried again is the same
experiment with the same settings, secrets and release, from the newest checkpoint. A run that stands still has not died and is
left alone: the trainer ends itself then.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dflashctl.errors import DflashctlError, InterruptedByUser, StartupDeath
from dflashctl.launch import Launched, Options
from dflashctl.runs import History, RunRecord
from dflashctl.session import HostSession
from dflashctl.stop import stop
from dflashctl.watch import status
from trainer.errors import ConfigError, NonFiniteError

FREED_S = 120.0
"""How long the GPUs of the dead run are waited for."""
_GRACE_S = 20.0
_HOPELESS = {
    2: "a wrong call",
    ConfigError.exit_code: "configuration, data or target",
    NonFiniteError.exit_code: "a loss that is not finite",
}
"""The trainer's exit codes for what the same again would meet again."""


def stay(
    session: HostSession,
    history: History,
    options: Options,
    most: int,
    start: Callable[[Options], Launched],
    follow: Callable[[RunRecord], dict[str, Any]],
    note: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Launch by `start`, `follow` to the end, and again, `most` times at most; the documents of all runs, in their order.

    `note` is told of each death why there is another try, or none. What is raised on the way has the runs so far in its
    details; StartupDeath is raised of the first run alone.
    """
    tries: list[dict[str, Any]] = []
    barren = 0
    with _told(tries):
        while True:
            record, document = _one(session, history, options, bool(tries), start, follow, note)
            tries.append(document)
            if document["exit_code"] == 0:
                return tries
            hopeless = _hopeless(document, len(tries), most)
            if not hopeless:
                stop(session, record, history, _GRACE_S)  # what it has left behind must not go on beside the next
                own = _own_checkpoint(session, record)
                options = _again(options, record, own)
                barren = 0 if own else barren + 1
                hopeless = "the last two runs have written no new checkpoint" if barren > 1 else None
            if hopeless:
                note(f"{record.name} is not tried again: {hopeless}")
                return tries
            begin = f"the checkpoint of {record.resumes} again" if options.resume else "the start, for want of a checkpoint"
            note(f"retry {len(tries)} of {most}: from {own or begin}")


def _one(
    session: HostSession,
    history: History,
    options: Options,
    is_retry: bool,
    start: Callable[[Options], Launched],
    follow: Callable[[RunRecord], dict[str, Any]],
    note: Callable[[str], None],
) -> tuple[RunRecord, dict[str, Any]]:
    """One run from its launch to its end; what dies within its first seconds at the first try raises StartupDeath."""
    try:
        document = start(options).document()
        record = history.find(f"{document['host']}:{document['run']}")
        state = follow(record)
    except StartupDeath as death:
        if not is_retry:
            raise
        note(str(death))
        document = death.details
        record = history.find(f"{document['host']}:{document['run']}")
        state, _ = status(session, record, history)
    return record, {**document, **state, "resumes": record.resumes}


def _hopeless(state: Mapping[str, Any], num_tries: int, most: int) -> str | None:
    """Why there is no other try after this end; None if there is, as after any signal and any crash."""
    if state["state"] == "stopped":
        return "it was stopped"
    if state["state"] == "exited" and state["exit_code"] in _HOPELESS:
        return f"exit code {state['exit_code']} is {_HOPELESS[state['exit_code']]}, which more tries do not mend"
    return f"that was the last of {most} retries" if num_tries > most else None


def _own_checkpoint(session: HostSession, record: RunRecord) -> str | None:
    """The newest checkpoint that the run itself has written, relative to the root."""
    request = {"root": session.host.root, "run": record.run, "launch_id": record.launch_id}
    found: str | None = session.call("runs", "checkpoint", request)["checkpoint"]
    return found


def _again(options: Options, record: RunRecord, own_checkpoint: str | None) -> Options:
    """How to go on from `record`, or from where it began if it has written no checkpoint."""
    return replace(
        options,
        resume=record if own_checkpoint else options.resume,
        release=record.release,
        clear_cache=False,
        force=False,  # nobody is there to hear what it overrides by then
        wait_gpu_s=max(options.wait_gpu_s, FREED_S),
    )


@contextmanager
def _told(tries: list[dict[str, Any]]) -> Iterator[None]:
    """Give an error the runs so far; Ctrl-C ends the tries and leaves the run alone, and says so."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedByUser("interrupted; nothing is tried again", details={"tries": tries}) from None
    except InterruptedByUser as error:
        sentence = f"{error}, and nothing is tried again"
        raise InterruptedByUser(sentence, hint=error.hint, details={**error.details, "tries": tries}) from None
    except DflashctlError as error:
        if tries:
            error.details = {**error.details, "tries": tries}
        raise
