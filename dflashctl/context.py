"""What every command starts from: hosts, history, the renderer; and how a command reaches one host or several.

A module of its own so that the command line is its commands. Nothing heavy is imported before it is needed.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dflashctl.errors import ExitCode, InterruptedByUser, RunNotFoundError, UsageError

if TYPE_CHECKING:
    from dflashctl.experiment import Experiment
    from dflashctl.hosts import Host, Hosts
    from dflashctl.launch import Launched, Options
    from dflashctl.render import LogStream, Renderer
    from dflashctl.runs import History, RunRecord
    from dflashctl.session import HostSession

T = TypeVar("T")


@dataclass
class Context:
    """What every command starts from."""

    hosts: "Hosts"
    history: "History"
    out: "Renderer"

    def host_name(self, flag: str | None, experiment: str | None = None) -> tuple[str, str]:
        """The host's name and where it came from: flag, DFLASHCTL_HOST, experiment, default."""
        variable = os.environ.get("DFLASHCTL_HOST")
        named = ((flag, "--host"), (variable, "DFLASHCTL_HOST"), (experiment, "experiment"), (self.hosts.default, "default"))
        return next((name, source) for name, source in named if name)

    def host(self, flag: str | None, experiment: str | None = None) -> "tuple[Host, str]":
        """The host itself; raises ConfigurationError where hosts.yaml does not have it."""
        name, source = self.host_name(flag, experiment)
        return self.hosts.get(name), source

    @contextmanager
    def session(self, host: "Host") -> "Iterator[HostSession]":
        """A connection for the length of the command."""
        from dflashctl.session import open_session

        with open_session(host) as session:
            yield session

    def places(self, names: list[str] | None, every: bool) -> "list[Host]":
        """The hosts that a command is for: those named, all of them, or the one that is meant where none is named."""
        if names and every:
            raise UsageError("--all and the names of hosts do not go together")
        if every:
            return list(self.hosts.hosts.values())
        return [self.hosts.get(name) for name in dict.fromkeys(names or [])] or [self.host(None)[0]]

    def on_each(
        self,
        places: "list[Host]",
        verb: "Callable[[HostSession], T]",
        show: "Callable[[Renderer, T], None]",
        document: "Callable[[T], dict[str, Any]]",
        code: "Callable[[T], int]" = lambda _: ExitCode.OK,
    ) -> int:
        """Run a verb on several hosts at once and show each answer as it comes; returns the worst exit code.

        With --json it is one document, in the order in which the hosts were named: {"hosts": [{host, error, ...}]}.
        """
        from dflashctl.fanout import side_by_side

        rows: dict[str, dict[str, Any]] = {}
        worst = int(ExitCode.OK)
        for outcome in side_by_side(places, verb):
            name, error = outcome.host.name, outcome.error
            rows[name] = {"host": name, "error": error and error.document()}
            if error:
                worst = max(worst, error.exit_code)
                rows[name] |= error.details
                self.out.failed_host(name, error)
                continue
            value = cast("T", outcome.value)
            rows[name] |= document(value)
            worst = max(worst, code(value))
            if not self.out.as_json:
                show(self.out.prefixed(name) if len(places) > 1 else self.out, value)
        if self.out.as_json:
            self.out.document({"hosts": [rows[place.name] for place in places]})
        return worst

    def refresh(self, places: "list[Host]") -> tuple[list[dict[str, str]], int]:
        """Take in what each host knows of runs; what went wrong, and the worst exit code."""
        from dflashctl import watch
        from dflashctl.fanout import side_by_side

        errors, worst = [], int(ExitCode.OK)
        before = self.history.newest()
        for outcome in side_by_side(places, watch.list_runs):
            if outcome.error:
                worst = max(worst, outcome.error.exit_code)
                errors.append({"host": outcome.host.name, "message": str(outcome.error)})
                self.out.note(f"warning: {outcome.host.name}: {outcome.error}")
            else:
                self.history.merge(outcome.host.name, outcome.value or [], before)
        return errors, worst

    def survey(self, places: "list[Host]") -> Iterator[tuple[dict[str, Any], int]]:
        """What each host says of its GPUs, as it comes in; a host that cannot be asked is a document with its error."""
        from dflashctl import watch
        from dflashctl.fanout import side_by_side

        for outcome in side_by_side(places, watch.survey):
            if outcome.value:
                yield outcome.value
            elif outcome.error:
                name, error = outcome.host.name, outcome.error
                yield {"host": name, "error": str(error), "note": None, "gpus": []}, error.exit_code

    def find(self, run: str | None) -> "tuple[Host, RunRecord]":
        """A run and its host; HOST:RUN also finds what this machine has never seen."""
        from dflashctl import watch

        try:
            record = self.history.find(run)
        except RunNotFoundError:
            host = (run or "").partition(":")[0]
            if ":" not in (run or "") or host not in self.hosts.hosts:
                raise
            before = self.history.newest()
            with self.session(self.hosts.hosts[host]) as session:
                self.history.merge(host, watch.list_runs(session), before)
            record = self.history.find(run)
        self.warn_of_torn_lines()
        return self.hosts.get(record.host), record

    def warn_of_torn_lines(self) -> None:
        """Say what of the history could not be read."""
        if self.history.torn_lines:
            self.out.note(f"warning: {self.history.torn_lines} unreadable line(s) in the history were passed over")

    def stop_each(self, places: "list[Host]", ask: Callable[[str], None] | None, grace_s: float) -> int:
        """Stop what is ours on each host, those of others named and left alone; the worst exit code. `ask` raises a no."""
        from dflashctl import render
        from dflashctl import stop as verbs
        from dflashctl.fanout import side_by_side

        found = {outcome.host.name: outcome for outcome in side_by_side(places, verbs.living_of_mine)}
        mine, others = ({place.name: (found[place.name].value or ([], []))[which] for place in places} for which in (0, 1))
        names, spared = (", ".join(run.name for runs in some.values() for run in runs) for some in (mine, others))
        if spared:
            self.out.note(f"not launched by you from here, left alone: {spared}")
        if names and ask:
            ask(names)

        def verb(session: "HostSession") -> list[dict[str, Any]]:
            if problem := found[session.host.name].error:
                raise problem
            return verbs.stop_each(session, mine[session.host.name], self.history, grace_s)

        return self.on_each(places, verb, render.stopped_each, lambda states: {"runs": states})

    def measure(self, session: "HostSession", loaded: "Experiment", options: "Options", key: str) -> tuple[str, dict[str, Any]]:
        """Run a program that is no training to its end; its run's name, and the document with `key` that it has left."""
        from dflashctl import programs, render, watch

        started = self.launch(session, loaded, replace(options, resume=None, startup_seconds=0))
        render.doubts(self.out, started)
        try:
            self.out.note(f"{started.run} is under way; its log, which `dflashctl tail {started.run}` shows, is {started.log}")
            watch.follow(session, started.record, self.history, lambda _data: None, self.out.note, watch.BEGIN)
        except KeyboardInterrupt:
            raise self._goes_on(started.record) from None
        return started.run, programs.result(session, started.record, key)

    def launch(self, session: "HostSession", loaded: "Experiment", options: "Options") -> "Launched":
        """Launch a run, and say each step."""
        from dflashctl import launch as verbs
        from dflashctl import render

        return verbs.launch(session, loaded, options, os.environ, self.history, render.launching(self.out))

    def start(self, session: "HostSession", loaded: "Experiment", options: "Options") -> "Launched":
        """Launch a run, and say for people what is under way; raises StartupDeath where it is not any more."""
        started = self.launch(session, loaded, options)
        if death := started.death(options.program):
            raise death
        self.show(started)
        return started

    def show(self, started: "Launched") -> None:
        """Say for people what is under way."""
        from dflashctl import render

        if not self.out.as_json:
            render.launched(self.out, started)

    def leave_or_follow(self, session: "HostSession", started: "Launched", follow: bool) -> ExitCode:
        """What comes of a run that is under way: for now, or with `follow` its log until it ends."""
        from dflashctl import watch

        if not follow:
            if self.out.as_json:
                self.out.document(started.document())
            return ExitCode.OK
        return self.follow(session, started.record, self.out.log(), started.document(), watch.BEGIN)

    def follow(
        self,
        session: "HostSession",
        record: "RunRecord",
        log: "LogStream",
        document: dict[str, Any],
        place: dict[str, Any] | None = None,
        lines: int = 10,
    ) -> ExitCode:
        """Show the log until the run ends, then `document` with its last state; OK if it exited 0."""
        state = self.watch(session, record, log, place, lines)
        if self.out.as_json:
            self.out.document(document | state)
        return ExitCode.OK if state["exit_code"] == 0 else ExitCode.RUN_FAILED

    def watch(
        self,
        session: "HostSession",
        record: "RunRecord",
        log: "LogStream",
        place: dict[str, Any] | None = None,
        lines: int = 10,
        patience_s: float | None = None,
    ) -> dict[str, Any]:
        """Show the log until the run ends; its last state. Ctrl-C leaves the run alone and raises InterruptedByUser."""
        from dflashctl import render, watch

        patience_s = watch.RECONNECT_S if patience_s is None else patience_s
        try:
            state = watch.follow(session, record, self.history, log.feed, self.out.note, place, lines, patience_s)
        except KeyboardInterrupt:
            raise self._goes_on(record) from None
        log.end()
        self.out.note(f"{record.name} {render.describe(state)}")
        return {"host": record.host, "tag": record.tag, **state}

    @staticmethod
    def _goes_on(record: "RunRecord") -> InterruptedByUser:
        """Ctrl-C leaves a run alone."""
        hint = f"dflashctl tail {record.run} shows it again, dflashctl stop {record.run} ends it"
        return InterruptedByUser(f"{record.name} goes on", hint=hint)

    def load(self, tag: str, file: Path | None, sets: list[str] | None) -> "Experiment":
        """The experiment in `file`, else in the nearest folder `experiments`, here or above."""
        from dflashctl.experiment import check_tag, load_experiment

        here = Path.cwd()
        beside = self.hosts.path.parent if self.hosts.path else here
        nearest = next((f for p in (here, *here.parents) if (f := p / "experiments").is_dir()), beside / "experiments")
        return load_experiment(check_tag(tag), file or nearest, sets or [])

    def experiment(
        self, tag: str, file: Path | None, sets: list[str] | None, flag: str | None, parent: "RunRecord | None" = None
    ) -> "tuple[Experiment, Host]":
        """An experiment and the host that it goes to, which is said first; that of `parent` where it goes on from one."""
        loaded = self.load(tag, file, sets)
        place, source = (self.hosts.get(parent.host), f"{parent.run}'s") if parent else self.host(flag, loaded.host)
        self.out.note(f"host {place.name} ({source})")
        return loaded, place


def make_context(as_json: bool) -> Context:
    """Hosts, history and renderer of this command; raises ConfigurationError."""
    from dflashctl.hosts import load_hosts
    from dflashctl.render import Renderer
    from dflashctl.runs import History, state_directory

    out = Renderer(as_json)
    hosts = load_hosts(os.environ, Path.cwd())
    if hosts.path is None:
        out.note(f"no hosts.yaml here or above: using the built-in host 'local', root {hosts.get('local').root}")
    places = {name: host.place for name, host in hosts.hosts.items()}
    return Context(hosts, History(state_directory(os.environ), places), out)
