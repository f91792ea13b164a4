"""The command line: parse, call one verb, render. The only place that exits.

Nothing heavy is imported before a command needs it, so that `--help` and completion answer at once.
"""

import io
import os
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dflashctl import starting
from dflashctl.arguments import All, File, HostName, HostNames, HostOptions, Json, Run, Sets
from dflashctl.context import make_context
from dflashctl.errors import DflashctlError, ExitCode, InterruptedByUser, StdoutClosed, UsageError, fault

app = typer.Typer(
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_WATCH_S = 2.0


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show versions and where they lie, and exit.")] = False,
) -> None:
    """Deploy a DFlash trainer to GPU hosts, launch runs by hypothesis, and follow them."""
    if version:
        from importlib.metadata import version as of

        from dflashctl.render import Renderer

        ours = f"dflashctl {of('dflashctl')} ({Path(__file__).parent})"
        python = f"Python {sys.version.split()[0]} ({sys.executable})"
        Renderer(False).line(f"{ours}, fabric {of('fabric')}, paramiko {of('paramiko')}, {python}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise UsageError(f"a command is missing\n\n{context.get_help()}")


@app.command()
def deploy(
    hosts: HostNames = None,
    every: All = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Ship the trainer package to each HOST: verified, parse-checked there, swapped in atomically."""
    from dflashctl import bundle, render

    ctx = make_context(as_json)
    places, packed = ctx.places(hosts, every), bundle.pack(os.environ)
    if len(places) > 1:
        verb = partial(bundle.deploy, bundle=packed, dry_run=dry_run)
        raise typer.Exit(ctx.on_each(places, verb, render.deployment, bundle.Deployment.document))
    with ctx.session(places[0]) as session:
        done = bundle.deploy(session, packed, dry_run)
    if as_json:
        ctx.out.document(done.document())
    else:
        render.deployment(ctx.out.prefixed(done.host), done)


app.command()(starting.launch)
app.command()(starting.smoke)
app.command()(starting.prepare)
app.command("eval")(starting.evaluate)


@app.command()
def tail(
    run: Run = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Lines to begin with.")] = 10,
    no_follow: Annotated[bool, typer.Option("--no-follow", help="Show what is there and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A document for each line, the last one the run's state.")] = False,
) -> None:
    """Show a run's log; ends with the run. Ctrl-C leaves the run alone."""
    from dflashctl import watch

    ctx = make_context(as_json)
    host, record = ctx.find(run)
    log = ctx.out.log(as_documents=as_json)
    with ctx.session(host) as session:
        if not no_follow:
            raise typer.Exit(ctx.follow(session, record, log, {}, lines=lines))
        state = watch.show(session, record, ctx.history, log.feed, lines)
    log.end()
    if as_json:
        ctx.out.document({"host": record.host, "tag": record.tag, **state})


@app.command()
def status(run: Run = None, hosts: HostOptions = None, every: All = False, as_json: Json = False) -> None:
    """Say what became of a run, from what it left on its host; with --host or --all, which runs live there."""
    from dflashctl import render, watch

    ctx = make_context(as_json)
    if hosts or every:
        _refuse_both(run)
        verb, show = partial(watch.living, history=ctx.history), render.living
        raise typer.Exit(ctx.on_each(ctx.places(hosts, every), verb, show, lambda states: {"runs": states}))
    host, record = ctx.find(run)
    with ctx.session(host) as session:
        state, code = watch.status(session, record, ctx.history)
    if as_json:
        ctx.out.document(state)
    else:
        render.status(ctx.out, state)
    raise typer.Exit(code)


def _refuse_both(run: str | None) -> None:
    if run is not None:
        raise UsageError("RUN and --host or --all do not go together: HOST:RUN names a run of one host")


@app.command()
def stop(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run id, unique prefix, or HOST:RUN.")] = None,
    hosts: HostOptions = None,
    every: All = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before several runs are stopped.")] = False,
    grace: Annotated[float, typer.Option(min=0, max=600, help="Seconds between TERM and KILL.")] = 20.0,
    as_json: Json = False,
) -> None:
    """Stop a run: TERM, grace, KILL over its whole process tree, then look whether anything is left.

    With --host or --all: every living run there that you launched from this machine, after asking.
    """
    from dflashctl import render
    from dflashctl import stop as verbs

    ctx = make_context(as_json)
    if hosts or every:
        _refuse_both(run)
        raise typer.Exit(ctx.stop_each(ctx.places(hosts, every), None if yes else _ask, grace))
    if run is None:
        raise UsageError("stop needs a RUN, --host or --all")
    host, record = ctx.find(run)
    with ctx.session(host) as session:
        state = verbs.stop(session, record, ctx.history, grace)
    if as_json:
        ctx.out.document(state)
    else:
        ctx.out.line(render.stopped(state))


def _ask(names: str) -> None:
    if not (sys.stdin and sys.stdin.isatty()):
        raise UsageError(f"this would stop {names}", hint="say --yes to do it")
    if not typer.confirm(f"stop {names}?", err=True):
        raise InterruptedByUser("nothing was stopped")


@app.command()
def push(
    host: Annotated[str, typer.Argument(metavar="HOST", help="A host of hosts.yaml.")],
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A file or folder here.")],
    dest: Annotated[
        str | None, typer.Argument(metavar="[DEST]", help="Where under the host's root; default: SRC's name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Send data or a target model to a host: in pieces, verified; again after a break, it goes on where it stopped.

    Example: dflashctl push ct200 targets/qwen3-8b targets/qwen3-8b
    """
    from dflashctl import render, transfer

    ctx = make_context(as_json)
    with ctx.session(ctx.hosts.get(host)) as session:
        done = transfer.push(session, source, dest, render.progress(ctx.out))
    ctx.out.document(done.document()) if as_json else render.moved(ctx.out, done)


@app.command()
def pull(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, unique prefix, or HOST:RUN.")],
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="What of its folder, such as checkpoints/latest.")] = ".",
    into: Annotated[Path, typer.Option(metavar="DIR", help="Where here; it gets a folder named RUN.")] = Path(),
    as_json: Json = False,
) -> None:
    """Fetch what a run has made, its log and checkpoints: in pieces, verified; again, only what is new.

    Example: dflashctl pull threadwarm-1 checkpoints/latest
    """
    from dflashctl import render, transfer

    ctx = make_context(as_json)
    host, record = ctx.find(run)
    with ctx.session(host) as session:
        done = transfer.pull(session, record, path, into, render.progress(ctx.out))
    ctx.out.document(done.document()) if as_json else render.moved(ctx.out, done)


@app.command()
def runs(
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask the hosts first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    host: HostName = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first, as this machine remembers them."""
    ctx = make_context(as_json)
    asked = [ctx.hosts.get(host)] if host else list(ctx.hosts.hosts.values())
    errors, worst = ctx.refresh(asked) if refresh else ([], int(ExitCode.OK))
    found = [r for r in ctx.history.records() if r.run and host in (None, r.host)][:limit]
    ctx.warn_of_torn_lines()
    if as_json:
        names = ("run", "host", "tag", "state", "exit_code", "created_at", "resumes", "release", "hypothesis", "launch_id")
        listed = [{name: getattr(record, name) for name in names} for record in found]
        ctx.out.document({"runs": listed, "errors": errors})
        raise typer.Exit(worst)
    rows = [(r.run, r.host, r.state, r.exit_code, r.created_at, r.resumes, (r.hypothesis or "").strip()) for r in found]
    ctx.out.table(("run", "host", "state", "exit", "launched", "resumes", "hypothesis"), rows)
    raise typer.Exit(worst)


@app.command()
def gpus(
    hosts: HostNames = None,
    every: All = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Every two seconds until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show each GPU: idle, busy or unknown, and why."""
    from dflashctl import render

    if watch and as_json:
        raise UsageError("--watch and --json do not go together: --json prints one document")
    ctx = make_context(as_json)
    places = ctx.places(hosts, every)
    while True:
        found: dict[str, dict[str, Any]] = {}
        worst = int(ExitCode.OK)
        for document, code in ctx.survey(places):
            found[document["host"]] = document
            worst = max(worst, code)
            if not as_json and not watch:
                render.gpus(ctx.out, [document], clear=False)
        documents = [found[place.name] for place in places]
        if as_json:
            ctx.out.document({"hosts": documents})
        if not watch:
            raise typer.Exit(worst)
        render.gpus(ctx.out, documents, clear=True)
        time.sleep(_WATCH_S)


@app.command()
def doctor(hosts: HostNames = None, every: All = False, as_json: Json = False) -> None:
    """Check whether each HOST is fit for runs: what was found, a command that shows it, the fix. Changes nothing."""
    from dflashctl import doctor as verbs
    from dflashctl import render

    ctx = make_context(as_json)
    places = ctx.places(hosts, every)
    raise typer.Exit(ctx.on_each(places, verbs.examine, render.checks, verbs.document, verbs.exit_code))


@app.command()
def setup(hosts: HostNames = None, every: All = False, as_json: Json = False) -> None:
    """Make an environment with the trainer's packages at pinned versions under each HOST's root, with uv or pip."""
    from dflashctl import environment as verbs
    from dflashctl import render

    ctx = make_context(as_json)
    places = ctx.places(hosts, every)
    ctx.out.note("installing torch and what goes with it can take minutes")
    raise typer.Exit(ctx.on_each(places, verbs.setup, render.environment, verbs.Environment.document))


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

    ctx = make_context(as_json)
    loaded = ctx.load(tag, experiment, sets)
    name, source = ctx.host_name(host, loaded.host)
    if host:  # an experiment's own may be in somebody else's hosts.yaml: it is shown all the same
        ctx.hosts.get(host)
    rows = describe(loaded)
    if as_json:
        values = [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
        ctx.out.document({"tag": tag, "host": name, "host_from": source, "values": values})
    else:
        ctx.out.note(f"would run on host {name} ({source})")
        ctx.out.table(("key", "value", "from"), rows, wrapped=1)


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
        code = app(args=_with_values(args), prog_name="dflashctl", standalone_mode=False)
    except DflashctlError as error:
        return _failed(as_json, error)
    except _WrongArguments as error:
        return _failed(as_json, _usage(error))
    except (KeyboardInterrupt, typer.Abort):
        return _failed(as_json, InterruptedByUser("interrupted"))
    except StdoutClosed as closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter does not complain again when it ends
        return closed.exit_code
    except Exception as error:
        if os.environ.get("DFLASHCTL_DEBUG"):
            raise
        return _failed(as_json, fault(error))
    if code == ExitCode.INTERRUPTED:  # typer has turned Ctrl-C into its code
        return _failed(as_json, InterruptedByUser("interrupted"))
    return int(code or 0)


def _with_values(args: list[str]) -> list[str]:
    """`--wait-gpu` without a number is `--wait-gpu inf`: typer has no option whose value may be left out."""
    full = list(args)
    for at in reversed([at for at, word in enumerate(args) if word == "--wait-gpu"]):
        try:
            float(args[at + 1])
        except (IndexError, ValueError):
            full.insert(at + 1, "inf")
    return full


def _usage(error: Any) -> UsageError:
    path = error.ctx.command_path if getattr(error, "ctx", None) else "dflashctl"
    return UsageError(error.format_message(), hint=f"{path} --help")


def _failed(as_json: bool, error: DflashctlError) -> int:
    from dflashctl.render import Renderer

    with suppress(StdoutClosed, DflashctlError, OSError, ValueError):
        Renderer(as_json).failure(error)
    return error.exit_code
