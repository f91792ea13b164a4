"""run.sh: the exact command of a run with everything it needs, so that started by hand it does the same."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from dflashctl.onhost.layout import RunFolder
from dflashctl.onhost.processes import MARK, NAME, UNKNOWN

START_S = 60.0
TAKEN = 75
"""run.sh's exit code when another run holds one of its GPUs (sysexits.h: EX_TEMPFAIL)."""
_LEASE_WAIT_S = 3


def script(
    folder: RunFolder,
    args: dict[str, Any],
    release: Path,
    cache: Path,
    own_cache: bool,
    leases: list[Path],
    later: list[Path],
) -> str:
    """The text of run.sh; `leases` are locked while the run lives, `later` are held by others now and taken over from them."""
    env = {
        "LANG": "C.UTF-8",
        **args["env"],
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(release), args["env"].get("PYTHONPATH")])),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        MARK: args["launch_id"],
        NAME: folder.run,
    }
    exports = "\n".join(f"    export {name}={shlex.quote(value)}" for name, value in sorted(env.items()))
    note = json.dumps({"run": folder.run, "by": args["record"]["launched_by"]})
    # a lock is waited for a moment, since whoever asks whether it is held takes it for that long
    locks = [f"flock -w {_LEASE_WAIT_S} -E {TAKEN} -F {shlex.quote(str(lease))}" for lease in leases]
    return _TEMPLATE.format(
        run=folder.run,
        mark=MARK,
        name=NAME,
        launch_id=args["launch_id"],
        folder=shlex.quote(str(folder.path)),
        exports=exports,
        unknown=UNKNOWN,
        python=shlex.quote(args["python"]),
        module=args["module"],
        arguments='"$PWD/config.json"' if args["arguments"] is None else " ".join(map(shlex.quote, args["arguments"])),
        clean="rm -rf ./cache\n" if own_cache else "",
        locks=" ".join([*locks, ""]),
        note=shlex.quote(note[:-1]),
        notes=_calls("note", leases, "    "),
        later=_calls("take_over", later, ""),
        taken=TAKEN,
    )


def _calls(function: str, paths: list[Path], indent: str) -> str:
    return "".join(f"{indent}{function} {shlex.quote(str(path))}\n" for path in paths)


# - The wrapper answers TERM with nothing, so that it outlives the trainer by the moment it takes to write the exit code; the
#   trainer gets the default back (a trap with a command is not inherited, an ignored HUP is).
# - A disk that is full by the end still has the room of one file for the exit code.
# - The environment is the trainer's alone: a PATH in it must not take rm and mv away from the wrapper.
# - `starting` keeps two starts apart from before the look at the pid file until the pid file is written.
# - flock -F becomes the command that it runs, with the lock on a descriptor that all below inherit.
_TEMPLATE = """#!/bin/sh
# Run {run}. By hand: `sh run.sh` returns at once; train.log grows; a run that lives is not started twice.
set -u
unset {mark} {name}  # where another run's environment starts this one, it is none of that run's processes
cd {folder} || exit 1
start_time() {{ sed 's/^.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }}
init_now=$(start_time 1)
init_now=${{init_now:-{unknown}}}
# processes that the kernel killed for memory in this cgroup: memory.events of v2, memory.oom_control of v1
oom_kills() {{
    v2=$(sed -n 's/^0:://p' /proc/self/cgroup)
    v1=$(grep -E '^[0-9]+:([a-z_,]*,)?memory(,[a-z_,]*)?:' /proc/self/cgroup | cut -d: -f3)
    cat "/sys/fs/cgroup$v2/memory.events" "/sys/fs/cgroup/memory$v1/memory.oom_control" 2>/dev/null |
        sed -n 's/^oom_kill //p' | head -n 1
}}
note() {{ printf '%s, "since": "%s"}}\\n' {note} "$(date -u +%Y-%m-%dT%H:%M:%SZ)" >"$1"; }}
# whether anything of this run lives: the wrapper, or a process with its mark
launch={launch_id}
lives() {{ kill -0 "$$" 2>/dev/null || grep -qs "{mark}=$launch" /proc/[0-9]*/environ; }}
# a lease that another run had when this one was forced upon its GPU
take_over() {{
    (
        until flock -n 9; do sleep 2; lives || exit; done
        note "$1"
        while lives; do sleep 2; done
    ) 9>>"$1" &
}}
stamp() {{ echo "$1 $(date +%s) $(cut -d' ' -f1 /proc/uptime) $(oom_kills)" >>times; }}
refuse_living() {{
    [ -r pid ] && [ ! -e exit_code ] || return 0
    read -r pid start init <pid
    if [ -n "$start" ] && [ "$(start_time "$pid")" = "$start" ] && [ "$init_now" = "$init" ]; then
        echo "{run} is running, pid $pid" >&2
        exit 1
    fi
}}
case "${{1-}}" in
'')
    refuse_living
    {locks}/bin/sh ./run.sh leased
    code=$?
    [ "$code" != {taken} ] || echo "{run}: another run holds one of its GPUs" >&2
    exit "$code"
    ;;
leased)
{notes}    find starting -maxdepth 0 -mmin +2 -exec rmdir {{}} + 2>/dev/null  # of a start that died
    mkdir starting 2>/dev/null || {{ echo "{run}: another start of it is under way" >&2; exit 1; }}
    (refuse_living) || {{ rmdir starting; exit 1; }}  # again: a start that was faster has written its pid by now
    rm -f pid exit_code stopped no_retries times
    setsid /bin/sh ./run.sh detached </dev/null >/dev/null 2>&1 &
    exit 0
    ;;
esac
trap '' HUP
trap : TERM INT
exec >>train.log 2>&1
{clean}echo 'kept for the exit code' >room
echo "$$ $(start_time $$) $init_now" >pid.tmp && mv pid.tmp pid
ready=$?
rmdir starting 2>/dev/null
[ "$ready" = 0 ] && [ ! -e stopped ] || exit 1
stamp started
{later}(
    unset LC_ALL
{exports}
    [ ! -e secrets.sh ] || . ./secrets.sh
    exec {python} -m {module} {arguments}
)
code=$?
{clean}rm -f room
stamp ended
echo "$code" >exit_code.tmp && mv exit_code.tmp exit_code
exit "$code"
"""
