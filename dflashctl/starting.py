"""The commands that start runs: launch, smoke, prepare, eval. Parse, call one verb, render; `dflashctl.cli` registers them.

Nothing heavy is imported before a command needs it, so that `--help` and completion answer at once.
"""

from dataclasses import replace
from typing import Annotated

import typer

from dflashctl.arguments import EnvFile, File, Follow, Force, Gpus, HostName, Json, Retries, Sets, WaitGpu
from dflashctl.context import make_context
from dflashctl.errors import ConfigurationError, ExitCode, SmokeRefusal, UsageError


def launch(
    tag: Annotated[str | None, typer.Option("--tag", help="The hypothesis's short name.")] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on from RUN's newest checkpoint, as a run of its own.")
    ] = None,
    experiment: File = None,
    host: HostName = None,
    gpus: Gpus = None,
    sets: Sets = None,
    env_file: EnvFile = None,
    follow: Follow = False,
    retries: Retries = 0,
    no_deploy: Annotated[bool, typer.Option("--no-deploy", help="Run the host's active release as it is.")] = False,
    warm_cache: Annotated[bool, typer.Option("--warm-cache", help="Share a compile cache with runs alike.")] = False,
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Empty the host's default inductor cache.")] = False,
    smoke_first: Annotated[bool, typer.Option("--smoke", help="Only if a smoke run says go.")] = False,
    wait_gpu: WaitGpu = 0.0,
    force: Force = False,
    startup_seconds: Annotated[float, typer.Option(min=0, max=3600, help="How long to watch the start.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Start a run of experiment TAG, detached, and see whether it survives its start.

    A RUN is resumed with what --set gave it; what --set says now comes on top.

    \b
    Examples: dflashctl launch --tag threadwarm --set batch.rows=8 --follow
              dflashctl launch --resume threadwarm-1
              dflashctl launch --tag threadwarm --retries 3
    """  # noqa: D301  # what typer takes for "leave these lines as they are" is the character \b
    from dflashctl import launch as verbs
    from dflashctl import placement, programs, watch
    from dflashctl.hosts import read_env_file
    from dflashctl.retries import PATIENCE_S, Ways, stay

    ctx = make_context(as_json)
    parent = ctx.find(resume)[1] if resume else None
    if parent:
        if host not in (None, parent.host):
            raise UsageError(f"{parent.name} can be resumed on its own host only, got --host {host}")
        tag = tag or parent.tag
    if tag is None:
        raise UsageError("launch needs --tag, or --resume RUN")
    if parent and tag == parent.tag:
        with ctx.session(ctx.hosts.get(parent.host)) as session:
            inherited = programs.overrides(session, parent)
        if inherited:
            ctx.out.note(f"as {parent.run} was set: {', '.join(inherited)}")
        sets = [*inherited, *(sets or [])]
    try:
        loaded, place = ctx.experiment(tag, experiment, sets, host, parent)
    except ConfigurationError as error:
        if not (parent and tag == parent.tag and tag.endswith(programs.PREPARE.suffix)):
            raise
        of = tag.removesuffix(programs.PREPARE.suffix)
        raise UsageError(f"{parent.name} made data and is no training: {error}", hint=f"dflashctl prepare {of}") from None
    if retries and "run.resume" in loaded.origins:
        raise ConfigurationError("run.resume is set by --retries; take it out of the experiment and of --set, say --resume RUN")
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
        living = parent if parent and retries and watch.lives(session, parent, ctx.history) else None
        if living:
            ctx.out.note(f"{living.name} still lives; it is followed, and tried again if it dies")
            options = replace(options, resume=ctx.find(f"{living.host}:{living.resumes}")[1] if living.resumes else None)
        elif smoke_first:
            run, found = ctx.measure(session, loaded, replace(options, program=programs.SMOKE), "go")
            if not found["go"]:
                raise SmokeRefusal(f"{run} says no-go: {'; '.join(found['reasons'])}", details={"run": run, **found})
        if not retries:
            raise typer.Exit(ctx.leave_or_follow(session, ctx.start(session, loaded, options), follow))
        ways = Ways(
            start=lambda options: ctx.launch(session, loaded, options),
            show=ctx.show,
            follow=lambda record: ctx.watch(
                session, record, ctx.out.log(), None if record is living else watch.BEGIN, patience_s=PATIENCE_S
            ),
            note=ctx.out.note,
        )
        tries = stay(session, ctx.history, options, retries, ways, living)
    if as_json:
        ctx.out.document(tries[-1] | {"tries": tries})
    raise typer.Exit(ExitCode.OK if tries[-1]["exit_code"] == 0 else ExitCode.RUN_FAILED)


def smoke(
    tag: Annotated[str, typer.Option("--tag", help="The experiment.")],
    experiment: File = None,
    host: HostName = None,
    gpus: Gpus = None,
    sets: Sets = None,
    env_file: EnvFile = None,
    wait_gpu: WaitGpu = 0.0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Try a few steps of experiment TAG at its real size on its real devices: go (0) or no-go (1), and why.

    Example: dflashctl smoke --tag threadwarm && dflashctl launch --tag threadwarm
    """
    from dflashctl import launch as verbs
    from dflashctl import placement, programs, render
    from dflashctl.hosts import read_env_file

    ctx = make_context(as_json)
    loaded, place = ctx.experiment(tag, experiment, sets, host)
    options = verbs.Options(
        program=programs.SMOKE,
        gpus=placement.parse_gpus(gpus) if gpus is not None else None,
        secrets=read_env_file(env_file) if env_file else {},
        wait_gpu_s=wait_gpu,
        force=force,
    )
    with ctx.session(place) as session:
        run, found = ctx.measure(session, loaded, options, "go")
    if as_json:
        ctx.out.document({"run": run, "host": place.name, **found})
    else:
        render.verdict(ctx.out, run, found)
    raise typer.Exit(ExitCode.OK if found["go"] else ExitCode.RUN_FAILED)


def prepare(
    tag: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="The experiment; its section `prepare` says how.")],
    experiment: File = None,
    host: HostName = None,
    gpus: Gpus = None,
    sets: Sets = None,
    env_file: EnvFile = None,
    follow: Follow = False,
    wait_gpu: WaitGpu = 0.0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Make the data of EXPERIMENT from chats, on its host, as a run of its own; killed, the same again goes on.

    Example: dflashctl prepare smollm2own --follow
    """
    from dflashctl import launch as verbs
    from dflashctl import placement, programs
    from dflashctl.hosts import read_env_file

    ctx = make_context(as_json)
    wanted = placement.parse_gpus(gpus) if gpus is not None else None
    if wanted and len(wanted) > 1:
        raise UsageError(f"prepare uses one GPU at most, got --gpus {gpus}")
    loaded, place = ctx.experiment(tag, experiment, sets, host)
    with ctx.session(place) as session:
        loaded, program = programs.preparation(session, loaded)
        options = verbs.Options(
            program=program,
            gpus=wanted,
            secrets=read_env_file(env_file) if env_file else {},
            wait_gpu_s=wait_gpu,
            force=force,
        )
        raise typer.Exit(ctx.leave_or_follow(session, ctx.start(session, loaded, options), follow))


def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, unique prefix, or HOST:RUN.")],
    prompts: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Prompts or shards under the host's root; default: what RUN's data hold out."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy, else at least 0.001.")] = 0.0,
    gpus: Annotated[str | None, typer.Option(metavar="0", help="The GPU by nvidia-smi's index.")] = None,
    wait_gpu: WaitGpu = 0.0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure what RUN's newest checkpoint is worth: acceptance length and speed of lossless speculative decoding.

    Example: dflashctl eval threadwarm-1 --limit 64
    """
    from dflashctl import launch as verbs
    from dflashctl import placement, programs, render

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
        loaded, program = programs.evaluation(session, record, prompts, more)
        options = verbs.Options(
            program=program, gpus=placement.parse_gpus(gpus) if gpus is not None else None, wait_gpu_s=wait_gpu, force=force
        )
        name, found = ctx.measure(session, loaded, options, "acceptance_length")
    if as_json:
        ctx.out.document({"run": name, "host": host.name, "of": record.run, **found})
    else:
        render.acceptance(ctx.out, name, found)
