"""`launch --retries N`: after a death that more tries can mend, what `launch --resume` would start, by itself.

A module of its own because it decides and stays, where `dflashctl.launch` starts and leaves. What is tried again is the same
experiment with the same settings, secrets and release, from the newest checkpoint. A run that stands still has not died and is
left alone: the trainer ends itself then. A host or container that is away is waited for where looking is all there is to do; a
launch is never sent twice.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dflashctl.errors import (
    ContainerError,
    DflashctlError,
    ExitCode,
    HostError,
    InterruptedByUser,
    RemoteTimeoutError,
    RetryRefused,
    StdoutClosed,
    StopIncompleteError,
)
from dflashctl.launch import Launched, Options
from dflashctl.runs import History, RunRecord
from dflashctl.session import HostSession, patiently
from dflashctl.stop import stop
from dflashctl.watch import look
from trainer.errors import ConfigError, NonFiniteError

PATIENCE_S = 900.0
"""How long a host that is away, or a container that is stopped, is waited for."""
FREED_S = 120.0
"""How long the GPUs of the dead run are waited for."""
_GRACE_S = 20.0
_HOPELESS = {
    2: "a wrong call",
    ConfigError.exit_code: "configuration, data or target",
    NonFiniteError.exit_code: "a loss that is not finite",
}
"""The trainer's exit codes for what the same again would meet again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways:
    """How to start a run, say that it is under way, follow it to its end, and say why there is another try or none."""

    start: Callable[[Options], Launched]
    show: Callable[[Launched], None]
    follow: Callable[[RunRecord], dict[str, Any]]
    note: Callable[[str], None]


@dataclass(slots=True)
class _Chain:
    """The documents of the runs that have ended, and the newest run."""

    tries: list[dict[str, Any]] = field(default_factory=list)
    record: RunRecord | None = None


def stay(
    session: HostSession, history: History, options: Options, most: int, ways: Ways, living: RunRecord | None = None
) -> list[dict[str, Any]]:
    """Launch a run, or take a `living` one, stay to its end, and again, `most` times at most; the documents of all runs.

    `options.resume` is where the first one goes on from, or has gone on from. What is raised on the way has the newest run and
    all documents so far in its details; StartupDeath is raised of the first run alone.
    """
    chain = _Chain(record=living)
    barren = 0
    with _told(chain, ways.note):
        while True:
            try:
                record, document = _one(session, history, options, chain, ways, None if chain.tries else living)
            except RetryRefused as refusal:
                ways.note(f"{chain.tries[-1]['host']}:{chain.tries[-1]['run']} is not tried again: {refusal}")
                return chain.tries
            chain.tries.append(document)
            if document["exit_code"] == 0:
                return chain.tries
            hopeless = _hopeless(document, len(chain.tries), most)
            if not hopeless:
                own, is_last = patiently(session, partial(_settled, session, history, record), PATIENCE_S, ways.note)
                options = _again(options, record, own)
                barren = 0 if own else barren + 1
                hopeless = "the last two runs have written no new checkpoint" if barren > 1 else None
                hopeless = f"{own} is that of its last step" if is_last else hopeless
            if hopeless:
                ways.note(f"{record.name} is not tried again: {hopeless}")
                return chain.tries
            begin = f"the checkpoint of {record.resumes} again" if options.resume else "the start, for want of a checkpoint"
            ways.note(f"retry {len(chain.tries)} of {most}: from {own or begin}")


def _one(
    session: HostSession, history: History, options: Options, chain: _Chain, ways: Ways, living: RunRecord | None
) -> tuple[RunRecord, dict[str, Any]]:
    """One run to its end; what dies within its first seconds at the first try raises StartupDeath."""
    if living:
        return living, {**ways.follow(living), "resumes": living.resumes}
    started = ways.start(options)
    record = chain.record = started.record
    if death := started.death():
        if not chain.tries:
            raise death
        ways.note(str(death))
        state = patiently(session, lambda: look(session, record, history, None).state, PATIENCE_S, ways.note)
        return record, {**death.details, **state, "resumes": record.resumes}
    ways.show(started)
    return record, {**started.document(), **ways.follow(record), "resumes": record.resumes}


def _settled(session: HostSession, history: History, record: RunRecord) -> tuple[str | None, bool]:
    """End what a dead run has left behind, that must not go on beside the next; what `_own_checkpoint` says."""
    try:
        stop(session, record, history, _GRACE_S, ends_retries=False)
    except StopIncompleteError as error:
        if error.details.get("survivors") != []:  # memory alone that is not given back yet is waited for by the launch
            raise
    return _own_checkpoint(session, record)


def _hopeless(state: Mapping[str, Any], num_tries: int, most: int) -> str | None:
    """Why there is no other try after this end; None if there is, as after any signal and any crash."""
    if state["state"] == "stopped":
        return "it was stopped"
    if state["state"] == "exited" and state["exit_code"] in _HOPELESS:
        return f"exit code {state['exit_code']} is {_HOPELESS[state['exit_code']]}, which more tries do not mend"
    return f"that was the last of {most} retries" if num_tries > most else None


def _own_checkpoint(session: HostSession, record: RunRecord) -> tuple[str | None, bool]:
    """The newest checkpoint that the run itself has written, relative to the root, and whether it is that of its last step."""
    request = {"root": session.host.root, "run": record.run, "launch_id": record.launch_id}
    found = session.call("runs", "checkpoint", request)
    return found["checkpoint"], found["is_last"]


def _again(options: Options, record: RunRecord, own_checkpoint: str | None) -> Options:
    """How to go on from `record`, or from where it began if it has written no checkpoint."""
    return replace(
        options,
        resume=record if own_checkpoint else options.resume,
        retries=record,
        release=record.release,
        clear_cache=False,
        force=False,  # nobody is there to hear what it overrides by then
        wait_gpu_s=max(options.wait_gpu_s, FREED_S),
    )


@contextmanager
def _told(chain: _Chain, note: Callable[[str], None]) -> Iterator[None]:
    """Give an error the runs so far; Ctrl-C, and a reader who goes away, end the tries and leave the run alone, as is said."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedByUser("interrupted; nothing is tried again", details={"tries": chain.tries}) from None
    except InterruptedByUser as error:
        sentence = f"{error}, and nothing is tried again"
        raise InterruptedByUser(sentence, hint=error.hint, details={**error.details, "tries": chain.tries}) from None
    except StdoutClosed:
        left = f"; {chain.record.name} is left alone: dflashctl status {chain.record.run}" if chain.record else ""
        note(f"nobody reads the output any more, and nothing is tried again{left}")
        raise StdoutClosed(ExitCode.RUN_FAILED) from None
    except DflashctlError as error:
        if chain.record:
            newest = {"run": chain.record.run, "host": chain.record.host}
            error.details = {**newest, **error.details, "tries": chain.tries}
            if isinstance(error, HostError | ContainerError | RemoteTimeoutError):
                error.hint = error.hint or f"later: dflashctl launch --resume {chain.record.run} --retries N"
        raise
