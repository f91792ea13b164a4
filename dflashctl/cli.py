"""The command line: parse, call one verb, render. The only place that exits.

Nothing heavy is imported before a command needs it, so that `--help` and completion answer at once.
"""

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dflashctl.errors import DflashctlError, ExitCode, InterruptedByUser, SmokeRefusal, StdoutClosed, UsageError

if TYPE_CHECKING:
    from dflashctl.experiment import Experiment
    from dflashctl.hosts import Host, Hosts
    from dflashctl.launch import Options
    from dflashctl.render import LogStream, Renderer
    from dflashctl.runs import History, RunRecord
    from dflashctl.session import HostSession

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Deploy a DFlash trainer to GPU hosts, launch runs by hypothesis, and follow them.",
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, also on failure.")]
HostName = Annotated[str | None, typer.Option("--host", "-H", metavar="HOST", help="A host of hosts.yaml.")]
Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run id, unique prefix, or HOST:RUN; none: the newest.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a trainer value.")]
_WATCH_S = 2.0

File = Annotated[
    Path | None, typer.Option("--experiment", metavar="FILE", help="Experiment file; default experiments/TAG.yaml.")
]


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

    def find(self, run: str | None) -> "tuple[Host, RunRecord]":
        """A run and its host; HOST:RUN also finds what this machine has never seen."""
        from dflashctl.errors import RunNotFoundError

        try:
            record = self.history.find(run)
        except RunNotFoundError:
            host = (run or "").partition(":")[0]
            if ":" not in (run or "") or host not in self.hosts.hosts:
                raise
            self.refresh(self.hosts.hosts[host])
            record = self.history.find(run)
        if self.history.torn_lines:
            self.out.note(f"warning: {self.history.torn_lines} unreadable line(s) in the history were passed over")
        return self.hosts.get(record.host), record

    def refresh(self, host: "Host") -> None:
        """Take in what the host knows of runs."""
        from dflashctl import watch

        with self.session(host) as session:
            watch.refresh(session, self.history)

    def load(self, tag: str, file: Path | None, sets: list[str] | None) -> "Experiment":
        """The experiment in `file`, else in the nearest folder `experiments`, here or above."""
        from dflashctl.experiment import check_tag, load_experiment

        here = Path.cwd()
        beside = self.hosts.path.parent if self.hosts.path else here
        nearest = next((f for p in (here, *here.parents) if (f := p / "experiments").is_dir()), beside / "experiments")
        return load_experiment(check_tag(tag), file or nearest, sets or [])

    def experiment(self, tag: str, file: Path | None, sets: list[str] | None, flag: str | None) -> "tuple[Experiment, Host]":
        """An experiment and the host that it goes to, which is said first."""
        loaded = self.load(tag, file, sets)
        place, source = self.host(flag, loaded.host)
        self.out.note(f"host {place.name} ({source})")
        return loaded, place


def _context(as_json: bool) -> Context:
    from dflashctl.hosts import load_hosts
    from dflashctl.render import Renderer
    from dflashctl.runs import History, state_directory

    out = Renderer(as_json)
    hosts = load_hosts(os.environ, Path.cwd())
    if hosts.path is None:
        out.note(f"no hosts.yaml here or above: using the built-in host 'local', root {hosts.get('local').root}")
    places = {name: host.place for name, host in hosts.hosts.items()}
    return Context(hosts, History(state_directory(os.environ), places), out)


@app.command()
def deploy(
    host: Annotated[str | None, typer.Argument(metavar="[HOST]", help="A host of hosts.yaml.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Ship the trainer package to HOST: verified, parse-checked there, swapped in atomically."""
    from dflashctl import bundle, render

    ctx = _context(as_json)
    with ctx.session(ctx.host(host)[0]) as session:
        done = bundle.deploy(session, bundle.pack(os.environ), dry_run)
    if as_json:
        ctx.out.document(done.document())
    else:
        render.deployment(ctx.out, done)


@app.command()
def launch(
    tag: Annotated[str, typer.Option("--tag", help="The hypothesis's short name.")],
    experiment: File = None,
    host: HostName = None,
    gpus: Annotated[str | None, typer.Option(metavar="0,1", help="GPUs by nvidia-smi's index.")] = None,
    sets: Sets = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show the log until the run ends.")] = False,
    no_deploy: Annotated[bool, typer.Option("--no-deploy", help="Run the host's active release as it is.")] = False,
    warm_cache: Annotated[bool, typer.Option("--warm-cache", help="Share a compile cache with runs alike.")] = False,
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Empty the host's default inductor cache.")] = False,
    smoke_first: Annotated[bool, typer.Option("--smoke", help="Only if a smoke run says go.")] = False,
    startup_seconds: Annotated[float, typer.Option(min=0, max=3600, help="How long to watch the start.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Start a run of experiment TAG, detached, and see whether it survives its start.

    Example: dflashctl launch --tag threadwarm --set batch.rows=8 --follow
    """
    from dflashctl import launch as verbs
    from dflashctl import placement, render, watch

    ctx = _context(as_json)
    loaded, place = ctx.experiment(tag, experiment, sets, host)
    options = verbs.Options(
        gpus=placement.parse_gpus(gpus) if gpus is not None else None,
        no_deploy=no_deploy,
        warm_cache=warm_cache,
        clear_cache=clear_cache,
        startup_seconds=startup_seconds,
    )
    with ctx.session(place) as session:
        if smoke_first:
            run, found = _smoke(ctx, session, loaded, options)
            if not found["go"]:
                raise SmokeRefusal(f"{run} says no-go: {'; '.join(found['reasons'])}", details={"run": run, **found})
        started = verbs.launch(session, loaded, options, os.environ, ctx.history, _progress(ctx.out))
        if not as_json:
            render.launched(ctx.out, started)
        if not follow:
            if as_json:
                ctx.out.document(started.document())
            return
        record = ctx.history.find(f"{started.host}:{started.run}")
        _follow(ctx, session, record, ctx.out.log(), started.document(), watch.BEGIN)


@app.command()
def smoke(
    tag: Annotated[str, typer.Option("--tag", help="The experiment.")],
    experiment: File = None,
    host: HostName = None,
    gpus: Annotated[str | None, typer.Option(metavar="0,1", help="GPUs by nvidia-smi's index.")] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Try a few steps of experiment TAG at its real size on its real devices: go (0) or no-go (1), and why.

    Example: dflashctl smoke --tag threadwarm && dflashctl launch --tag threadwarm
    """
    from dflashctl import launch as verbs
    from dflashctl import placement, render

    ctx = _context(as_json)
    loaded, place = ctx.experiment(tag, experiment, sets, host)
    chosen = placement.parse_gpus(gpus) if gpus is not None else None
    with ctx.session(place) as session:
        run, found = _smoke(ctx, session, loaded, verbs.Options(gpus=chosen))
    if as_json:
        ctx.out.document({"run": run, "host": place.name, **found})
    else:
        render.verdict(ctx.out, run, found)
    raise typer.Exit(ExitCode.OK if found["go"] else ExitCode.RUN_FAILED)


def _smoke(ctx: Context, session: "HostSession", loaded: "Experiment", options: "Options") -> tuple[str, dict[str, Any]]:
    """Run a smoke test to its end; its name and what it found."""
    from dflashctl import launch as verbs
    from dflashctl import watch

    options = replace(options, smoke=True, startup_seconds=0)
    started = verbs.launch(session, loaded, options, os.environ, ctx.history, _progress(ctx.out))
    record = ctx.history.find(f"{started.host}:{started.run}")
    ctx.out.note(f"{started.run} tries a few steps; its log is {started.log}")
    state = watch.follow(session, record, lambda _data: None, ctx.out.note, watch.BEGIN)
    watch.remember(ctx.history, record, state)
    return started.run, verbs.verdict(session, record)


def _progress(out: "Renderer") -> Any:
    def report(what: str, value: Any) -> None:
        if what == "deployed":
            out.note(f"release {value.release}: {'sent' if value.uploaded_bytes else 'already there, intact'}")
        elif what == "gpus" and value:
            out.note("GPUs " + ", ".join(f"{gpu.index} ({gpu.name})" for gpu in value) + ": idle")

    return report


def _follow(
    ctx: Context,
    session: "HostSession",
    record: "RunRecord",
    log: "LogStream",
    document: dict[str, Any],
    place: dict[str, Any] | None = None,
    lines: int = 10,
) -> NoReturn:
    """Show the log until the run ends; exit 0 if it exited 0, else 1. Ctrl-C leaves the run alone."""
    from dflashctl import render, watch

    try:
        state = watch.follow(session, record, log.feed, ctx.out.note, place, lines)
    except KeyboardInterrupt:
        hint = f"dflashctl tail {record.run} shows it again, dflashctl stop {record.run} ends it"
        raise InterruptedByUser(f"{record.name} goes on", hint=hint) from None
    log.end()
    watch.remember(ctx.history, record, state)
    ctx.out.note(f"{record.name} {render.describe(state)}")
    if ctx.out.as_json:
        ctx.out.document(document | {"host": record.host, "tag": record.tag, **state})
    raise typer.Exit(ExitCode.OK if state["exit_code"] == 0 else ExitCode.RUN_FAILED)


@app.command()
def tail(
    run: Run = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Lines to begin with.")] = 10,
    no_follow: Annotated[bool, typer.Option("--no-follow", help="Show what is there and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A document for each line, the last one the run's state.")] = False,
) -> None:
    """Show a run's log; ends with the run. Ctrl-C leaves the run alone."""
    from dflashctl import watch

    ctx = _context(as_json)
    host, record = ctx.find(run)
    log = ctx.out.log(as_documents=as_json)
    with ctx.session(host) as session:
        if not no_follow:
            _follow(ctx, session, record, log, {}, lines=lines)
        state = watch.show(session, record, log.feed, lines)
    log.end()
    if as_json:
        ctx.out.document({"host": record.host, "tag": record.tag, **state})


@app.command()
def status(run: Run = None, as_json: Json = False) -> None:
    """Say what became of a run, from what it left on its host."""
    from dflashctl import render, watch

    ctx = _context(as_json)
    host, record = ctx.find(run)
    with ctx.session(host) as session:
        state, code = watch.status(session, record)
    if as_json:
        ctx.out.document(state)
    else:
        render.status(ctx.out, state)
    raise typer.Exit(code)


@app.command()
def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, unique prefix, or HOST:RUN.")],
    grace: Annotated[float, typer.Option(min=0, max=600, help="Seconds between TERM and KILL.")] = 20.0,
    as_json: Json = False,
) -> None:
    """Stop a run: TERM, grace, KILL over its whole process tree, then look whether anything is left."""
    from dflashctl import launch as verbs
    from dflashctl import render

    ctx = _context(as_json)
    host, record = ctx.find(run)
    with ctx.session(host) as session:
        state = verbs.stop(session, record, ctx.history, grace)
    if as_json:
        ctx.out.document(state)
    else:
        ctx.out.line(f"{record.name} {'had already ended: ' if state['already'] else ''}{render.describe(state)}")


@app.command()
def runs(
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask the hosts first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    host: HostName = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first, as this machine remembers them."""
    ctx = _context(as_json)
    failed: list[tuple[str, DflashctlError]] = []
    asked = [ctx.hosts.get(host)] if host else list(ctx.hosts.hosts.values())
    if refresh:
        for place in asked:
            try:
                ctx.refresh(place)
            except DflashctlError as error:
                failed.append((place.name, error))
    found = [r for r in ctx.history.records() if r.run and host in (None, r.host)][:limit]
    worst = max((problem.exit_code for _, problem in failed), default=ExitCode.OK)
    for name, problem in failed:
        ctx.out.note(f"warning: {name}: {problem}")
    if ctx.history.torn_lines:
        ctx.out.note(f"warning: {ctx.history.torn_lines} unreadable line(s) in the history were passed over")
    if as_json:
        names = ("run", "host", "tag", "state", "exit_code", "created_at", "release", "hypothesis", "launch_id")
        listed = [{name: getattr(record, name) for name in names} for record in found]
        errors = [{"host": name, "message": str(problem)} for name, problem in failed]
        ctx.out.document({"runs": listed, "errors": errors})
        raise typer.Exit(worst)
    rows = [(r.run, r.host, r.state, r.exit_code, r.created_at, (r.hypothesis or "").strip()) for r in found]
    ctx.out.table(("run", "host", "state", "exit", "launched", "hypothesis"), rows)
    raise typer.Exit(worst)


@app.command()
def gpus(
    hosts: Annotated[list[str] | None, typer.Argument(metavar="[HOST...]", help="Hosts of hosts.yaml.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Every two seconds until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show each GPU: idle, busy or unknown, and why."""
    from dflashctl import render

    if watch and as_json:
        raise UsageError("--watch and --json do not go together: --json prints one document")
    ctx = _context(as_json)
    places = [ctx.hosts.get(name) for name in hosts or []] or [ctx.host(None)[0]]
    while True:
        documents, code = _survey(ctx, places)
        if as_json:
            ctx.out.document({"hosts": documents})
        else:
            render.gpus(ctx.out, documents, clear=watch)
        if not watch:
            raise typer.Exit(code)
        time.sleep(_WATCH_S)


def _survey(ctx: Context, places: "list[Host]") -> tuple[list[dict[str, Any]], int]:
    from dflashctl.watch import survey

    documents, worst = [], ExitCode.OK
    for place in places:
        try:
            with ctx.session(place) as session:
                document, code = survey(session)
        except DflashctlError as error:
            document, code = {"host": place.name, "error": str(error), "note": None, "gpus": []}, error.exit_code
        documents.append(document)
        worst = max(worst, code)
    return documents, worst


@app.command()
def show(
    tag: Annotated[str, typer.Argument(help="The experiment.")],
    experiment: File = None,
    host: HostName = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Print the merged experiment and where each value came from."""
    from dflashctl.experiment import describe

    ctx = _context(as_json)
    loaded = ctx.load(tag, experiment, sets)
    name, source = ctx.host_name(host, loaded.host)
    rows = describe(loaded)
    if as_json:
        values = [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
        ctx.out.document({"tag": tag, "host": name, "host_from": source, "values": values})
    else:
        ctx.out.note(f"would run on host {name} ({source})")
        ctx.out.table(("key", "value", "from"), rows)


_WrongArguments: type[Exception] = typer.BadParameter.__mro__[2]
"""What typer raises for wrong arguments: the base of the one such class that it names in public."""


def main() -> NoReturn:
    """Run the command line; every way out of it is here."""
    raise SystemExit(_run(sys.argv[1:]))


def _run(args: list[str]) -> int:
    as_json = "--json" in args
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a log may hold what this terminal cannot show
    try:
        code = app(args=args, prog_name="dflashctl", standalone_mode=False)
    except DflashctlError as error:
        return _failed(as_json, error)
    except _WrongArguments as error:
        return _failed(as_json, _usage(error))
    except (KeyboardInterrupt, typer.Abort):
        return _failed(as_json, InterruptedByUser("interrupted"))
    except StdoutClosed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter does not complain again when it ends
        return ExitCode.OK
    except Exception as error:
        if os.environ.get("DFLASHCTL_DEBUG"):
            raise
        sentence = f"{type(error).__name__}: {error}"
        return _failed(as_json, DflashctlError(sentence, hint="a fault of dflashctl; DFLASHCTL_DEBUG=1 shows where"))
    if code == ExitCode.INTERRUPTED:  # typer has turned Ctrl-C into its code
        return _failed(as_json, InterruptedByUser("interrupted"))
    return int(code or 0)


def _usage(error: Any) -> UsageError:
    path = error.ctx.command_path if getattr(error, "ctx", None) else "dflashctl"
    return UsageError(error.format_message(), hint=f"{path} --help")


def _failed(as_json: bool, error: DflashctlError) -> int:
    from dflashctl.render import Renderer

    with suppress(StdoutClosed, OSError, ValueError):
        Renderer(as_json).failure(error)
    return error.exit_code
