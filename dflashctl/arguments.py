"""Arguments and options that several commands share: one spelling and one sentence each."""

from pathlib import Path
from typing import Annotated

import typer

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
File = Annotated[
    Path | None, typer.Option("--experiment", metavar="FILE", help="Experiment file; default experiments/TAG.yaml.")
]
Gpus = Annotated[str | None, typer.Option("--gpus", metavar="0,1", help="GPUs by nvidia-smi's index.")]
WaitGpu = Annotated[
    float, typer.Option("--wait-gpu", metavar="[SECONDS]", min=0, help="Wait for busy GPUs, without SECONDS for ever.")
]
Force = Annotated[bool, typer.Option("--force", help="Use GPUs that are busy, held or unknown; says which.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show the log until the run ends.")]
Retries = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Stay, and after a death that more tries can mend go on, N times at most; each waits two minutes for its GPUs, "
        "--wait-gpu for longer. With --resume of a RUN that still lives: follow it, and go on if it dies.",
    ),
]
