"""The command line: parse, call one verb, render. The only place that exits.

Nothing heavy is imported before a command needs it, so that `--help` and completion answer at once.
"""

import io
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dflashctl.context import make_context
from dflashctl.errors import DflashctlError, ExitCode, InterruptedByUser, SmokeRefusal, StdoutClosed, UsageError

if TYPE_CHECKING:
    pass

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Deploy a DFlash trainer to GPU hosts, launch runs by hypothesis, and follow them.",
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, also on failure.")]
All = Annotated[bool, typer.Option("--all", help="Every host of hosts.yaml, side by side.")]
HostNames = Annotated[list[str] | None, typer.Argument(metavar="[HOST...]", help="Hosts of hosts.yaml.")]
HostOptions = Annotated[list[str] | None, typer.Option("--host", "-H", metavar="HOST", help="A host; may be repeated.")]
HostName = Annotated[str | None, typer.Option("--host", "-H", metavar="HOST", help="A host of hosts.yaml.")]
Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run id, unique prefix, or HOST:RUN; none: the newest.")]
EnvFile = Annotated[
    Path | None, typer.Option("--env-file", metavar="FILE", help="NAME=VALUE lines for the run; values are never shown.")
]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a trainer value.")]
_WATCH_S = 2.0

File = Annotated[
    Path | None, typer.Option("--experiment", metavar="FILE", help="Experiment file; default experiments/TAG.yaml.")
]


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


@app.command()
def launch(
    tag: Annotated[str | None, typer.Option("--tag", help="The hypothesis's short name.")] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on from RUN's newest checkpoint, as a run of its own.")
    ] = None,
    experiment: File = None,
    host: HostName = None,
    gpus: Annotated[str | None, typer.Option(metavar="0,1", help="GPUs by nvidia-smi's index.")] = None,
    sets: Sets = None,
    env_file: EnvFile = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show the log until the run ends.")] = False,
    no_deploy: Annotated[bool, typer.Option("--no-deploy", help="Run the host's active release as it is.")] = False,
    warm_cache: Annotated[bool, typer.Option("--warm-cache", help="Share a compile cache with runs alike.")] = False,
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Empty the host's default inductor cache.")] = False,
    smoke_first: Annotated[bool, typer.Option("--smoke", help="Only if a smoke run says go.")] = False,
    wait_gpu: Annotated[
        float, typer.Option("--wait-gpu", metavar="[SECONDS]", min=0, help="Wait for busy GPUs, without SECONDS for ever.")
    ] = 0.0,
    force: Annotated[bool, typer.Option("--force", help="Use GPUs that are busy, held or unknown; says which.")] = False,
    startup_seconds: Annotated[float, typer.Option(min=0, max=3600, help="How long to watch the start.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Start a run of experiment TAG, detached, and see whether it survives its start.

    Examples: dflashctl launch --tag threadwarm --set batch.rows=8 --follow
              dflashctl launch --resume threadwarm-1
    """
    from dflashctl import launch as verbs
    from dflashctl import placement, render, watch
    from dflashctl.hosts import read_env_file

    ctx = make_context(as_json)
    parent = ctx.find(resume)[1] if resume else None
    if parent:
        if host not in (None, parent.host):
            raise UsageError(f"{parent.name} can be resumed on its own host only, got --host {host}")
        tag, host = tag or parent.tag, parent.host
    if tag is None:
        raise UsageError("launch needs --tag, or --resume RUN")
    loaded, place = ctx.experiment(tag, experiment, sets, host)
    options = verbs.Options(
        gpus=placement.parse_gpus(gpus) if gpus is not None else None,
        resume=parent,
        no_deploy=no_deploy,
        warm_cache=warm_cache,
        clear_cache=clear_cache,
        secrets=read_env_file(env_file) if env_file else {},
        startup_seconds=startup_seconds,
        wait_gpu_s=wait_gpu,
        force=force,
    )
    with ctx.session(place) as session:
        if smoke_first:
            run, found = ctx.measure(session, loaded, replace(options, program=verbs.SMOKE), "go")
            if not found["go"]:
                raise SmokeRefusal(f"{run} says no-go: {'; '.join(found['reasons'])}", details={"run": run, **found})
        started = verbs.launch(session, loaded, options, os.environ, ctx.history, render.launching(ctx.out))
        if not as_json:
            render.launched(ctx.out, started)
        if not follow:
            if as_json:
                ctx.out.document(started.document())
            return
        record = ctx.history.find(f"{started.host}:{started.run}")
        raise typer.Exit(ctx.follow(session, record, ctx.out.log(), started.document(), watch.BEGIN))


@app.command()
def smoke(
    tag: Annotated[str, typer.Option("--tag", help="The experiment.")],
    experiment: File = None,
    host: HostName = None,
    gpus: Annotated[str | None, typer.Option(metavar="0,1", help="GPUs by nvidia-smi's index.")] = None,
    sets: Sets = None,
    env_file: EnvFile = None,
    as_json: Json = False,
) -> None:
    """Try a few steps of experiment TAG at its real size on its real devices: go (0) or no-go (1), and why.

    Example: dflashctl smoke --tag threadwarm && dflashctl launch --tag threadwarm
    """
    from dflashctl import launch as verbs
    from dflashctl import placement, render
    from dflashctl.hosts import read_env_file

    ctx = make_context(as_json)
    loaded, place = ctx.experiment(tag, experiment, sets, host)
    options = verbs.Options(
        gpus=placement.parse_gpus(gpus) if gpus is not None else None, secrets=read_env_file(env_file) if env_file else {}
    )
    with ctx.session(place) as session:
        run, found = ctx.measure(session, loaded, replace(options, program=verbs.SMOKE), "go")
    if as_json:
        ctx.out.document({"run": run, "host": place.name, **found})
    else:
        render.verdict(ctx.out, run, found)
    raise typer.Exit(ExitCode.OK if found["go"] else ExitCode.RUN_FAILED)


@app.command("eval")
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, unique prefix, or HOST:RUN.")],
    prompts: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Prompts or shards under the host's root; default: what RUN's data hold out."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    gpus: Annotated[str | None, typer.Option(metavar="0", help="The GPU by nvidia-smi's index.")] = None,
    as_json: Json = False,
) -> None:
    """Measure what RUN's newest checkpoint is worth: acceptance length and speed of lossless speculative decoding.

    Example: dflashctl eval threadwarm-1 --limit 64
    """
    from dflashctl import launch as verbs
    from dflashctl import placement, render

    ctx = make_context(as_json)
    host, record = ctx.find(run)
    more = [
        *(["--limit", str(limit)] if limit else []),
        "--max-new-tokens",
        str(max_new_tokens),
        "--temperature",
        str(temperature),
    ]
    with ctx.session(host) as session:
        loaded, program = verbs.evaluation(session, record, prompts, more)
        options = verbs.Options(program=program, gpus=placement.parse_gpus(gpus) if gpus is not None else None)
        name, found = ctx.measure(session, loaded, options, "acceptance_length")
    if as_json:
        ctx.out.document({"run": name, "host": host.name, "of": record.run, **found})
    else:
        render.acceptance(ctx.out, name, found)


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
        names = ("run", "host", "tag", "state", "exit_code", "created_at", "release", "hypothesis", "launch_id")
        listed = [{name: getattr(record, name) for name in names} for record in found]
        ctx.out.document({"runs": listed, "errors": errors})
        raise typer.Exit(worst)
    rows = [(r.run, r.host, r.state, r.exit_code, r.created_at, (r.hypothesis or "").strip()) for r in found]
    ctx.out.table(("run", "host", "state", "exit", "launched", "hypothesis"), rows)
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
        code = app(args=_with_values(args), prog_name="dflashctl", standalone_mode=False)
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

    with suppress(StdoutClosed, OSError, ValueError):
        Renderer(as_json).failure(error)
    return error.exit_code
