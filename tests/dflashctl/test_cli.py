"""The command line as people type it: (args, exit code, text), JSON on failure too, and a help that is quick."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dflashctl import cli

TABLE = [
    # usage
    ([], 2, "a command is missing"),
    (["-h"], 0, "Commands:"),
    (["nonsense"], 2, "No such command 'nonsense'"),
    (["show", "quick", "more"], 2, "unexpected extra argument"),
    (["deploy", "local", "--all"], 2, "do not go together"),
    (["launch"], 2, "launch needs --tag"),
    (["launch", "--tag", "quick", "--startup-seconds", "x"], 2, "valid number"),
    (["stop"], 2, "stop needs a RUN"),
    (["tail", "-n", "-1"], 2, "greater than or equal to 0"),
    (["gpus", "--watch", "--json"], 2, "do not go together"),
    # configuration
    (["deploy", "ct2000"], 3, "host 'ct2000'"),
    (["gpus", "lokal"], 3, "did you mean 'local'?"),
    (["launch", "--tag", "Thread Warm"], 3, "try 'thread-warm'"),
    (["launch", "--tag", "quik"], 3, "did you mean 'quick'?"),
    (["launch", "--tag", "quick", "--host", "nope"], 3, "host 'nope'"),
    (["launch", "--tag", "quick", "--set", "draft.blok_size=8"], 3, "did you mean 'block_size'?"),
    (["launch", "--tag", "quick", "--set", "draft.block_size=1"], 3, "draft.block_size must be 2..64, got 1"),
    (["launch", "--tag", "quick", "--set", "block_size"], 3, "SECTION.KEY=VALUE"),
    (["launch", "--tag", "quick", "--gpus", "0,x"], 3, "--gpus"),
    (["launch", "--tag", "cuda"], 3, "local has none: there is no nvidia-smi on this host"),
    (["show", "quick", "--experiment", "missing.yaml"], 3, "missing.yaml"),
    # runs
    (["tail"], 10, "no run yet"),
    (["status", "nope"], 10, "no run 'nope'"),
    (["status", "local:nope-1"], 10, "no run 'local:nope-1'"),
    (["stop", "nope"], 10, "no run 'nope'"),
    (["stop", "../etc"], 10, "RUN must be"),
    # what works
    (["runs"], 0, ""),
    (["gpus"], 0, "there is no nvidia-smi on this host"),
    (["show", "quick"], 0, "draft.block_size\t16\tdefault"),
    (["show", "quick", "--set", "draft.block_size=8"], 0, "draft.block_size\t8\t--set"),
    (["deploy", "--dry-run"], 0, "would activate release"),
]


@pytest.mark.parametrize(("args", "code", "text"), TABLE, ids=[" ".join(row[0]) or "(none)" for row in TABLE])
def test_table(bench, args: list[str], code: int, text: str) -> None:
    bench.experiment("cuda", "cuda:0")
    done = bench(*args)
    assert done.exit_code == code, done.stderr
    assert text in done.stdout + done.stderr
    if args and "--json" not in args:
        assert not (done.stdout and done.exit_code), "an error belongs on stderr"


@pytest.mark.parametrize("args", [row[0] for row in TABLE if row[0] and row[1] and "--watch" not in row[0]], ids=" ".join)
def test_failures_are_one_document_with_json(bench, args: list[str]) -> None:
    bench.experiment("cuda", "cuda:0")
    code = {" ".join(row[0]): row[1] for row in TABLE}[" ".join(args)]
    done = bench(*args, "--json")
    assert done.exit_code == code
    if "nonsense" not in args:
        assert set(done.document["error"]) == {"code", "message", "hint"}


def test_an_unknown_host_and_a_broken_file_are_named_with_their_place(bench) -> None:
    bench.hosts("hosts:\n  local: {transport: local, rot: .dflash}\n")
    done = bench("gpus")
    assert done.exit_code == 3
    assert "hosts.yaml" in done.stderr
    assert "did you mean 'root'?" in done.stderr


def test_the_built_in_host_is_said_once_and_a_file_is_not(bench) -> None:
    assert bench("runs").stderr.count("built-in host 'local'") == 1
    bench.hosts("hosts:\n  local: {transport: local, root: .dflash}\ndefault: local\n")
    assert bench("runs").stderr == ""


def test_which_host(bench) -> None:
    bench.hosts("default: a\nhosts:\n" + "".join(f"  {n}: {{transport: local, root: .{n}}}\n" for n in ("a", "b", "c", "d")))
    path = bench.experiment("quick")
    said = lambda *more: bench("launch", "--tag", "quick", "--startup-seconds", "0", *more).stderr.splitlines()[0]  # noqa: E731
    assert said() == "host a (default)"
    path.write_text(path.read_text() + "host: b\n")
    assert said() == "host b (experiment)"
    bench.env["DFLASHCTL_HOST"] = "c"
    assert said() == "host c (DFLASHCTL_HOST)"
    assert said("--host", "d") == "host d (--host)"
    assert (bench.folder / ".d/runs/quick-1").is_dir()


def test_the_version_says_what_runs_and_where(bench) -> None:
    done = bench("--version")
    assert done.exit_code == 0
    assert re.fullmatch(
        rf"dflashctl \S+ \({re.escape(str(Path(cli.__file__).parent))}\), fabric \S+, paramiko \S+, "
        rf"Python {re.escape(sys.version.split()[0])} \(\S+\)\n",
        done.stdout,
    )


def test_without_a_command_the_commands_are_listed(bench) -> None:
    done = bench()
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: a command is missing\n")
    assert "  launch   " in done.stderr


def test_an_example_is_a_line_of_its_own(bench) -> None:
    lines = bench("launch", "-h").stdout.splitlines()
    assert "  Examples: dflashctl launch --tag threadwarm --set batch.rows=8 --follow" in lines
    assert "            dflashctl launch --resume threadwarm-1" in lines


def test_help_imports_nothing_heavy() -> None:
    probe = """
        import sys
        from dflashctl.cli import main
        sys.argv = ["dflashctl", "--help"]
        try:
            main()
        except SystemExit as error:
            assert error.code == 0
        heavy = {"torch", "transformers", "numpy", "fabric", "paramiko", "invoke", "yaml", "rich", "trainer"} & set(sys.modules)
        sys.exit(f"imported {sorted(heavy)}" if heavy else 0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(probe)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_gpus_document(bench) -> None:
    bench.nvidia_smi(
        """
        case "$1" in
        --query-gpu=*)
        printf '%s' 'index, uuid, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%], '
        echo 'temperature.gpu, power.draw [W], mig.mode.current'
        cat <<'END'
        0, GPU-aaaa, NVIDIA H200, 0, 143771, 0, 38, 121.09, Disabled
        1, GPU-bbbb, NVIDIA H200, 71000, 143771, 98, 60, 500.00, Disabled
        2, GPU-cccc, NVIDIA H200, [Unknown Error], 143771, 0, [N/A], [N/A], Disabled
        END
        ;;
        *) echo "gpu_uuid, pid, process_name, used_gpu_memory [MiB]"; echo "GPU-bbbb, 4711, python, train.py, 71000";;
        esac
        """
    )
    document = bench("gpus", "--json").document
    assert document["hosts"][0]["host"] == "local"
    rows = document["hosts"][0]["gpus"]
    assert [row["state"] for row in rows] == ["idle", "busy", "unknown"]
    assert "4711" in rows[1]["reason"]
    assert rows[2]["memory_used_mib"] is None
    values = "index uuid name memory_used_mib memory_total_mib utilization_percent temperature_c power_w"
    assert list(rows[0]) == [*values.split(), "state", "reason", "processes", "leases"]
    lines = bench("gpus").stdout.splitlines()
    assert [line.split("\t")[7] for line in lines] == ["idle", "busy", "unknown"]


def test_launch_takes_idle_gpus_by_uuid_and_refuses_others(bench) -> None:
    bench.experiment("cuda", "cuda:0")
    bench.nvidia_smi(
        f"""
        case "$1" in --query-compute-apps=*) exit 0;; esac
        echo "index, uuid, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%]"
        echo "0, GPU-take0-{os.getpid()}, NVIDIA H200, 9000, 143771, 0"
        echo "1, GPU-take1-{os.getpid()}, NVIDIA H200, 0, 143771, 0"
        echo "2, GPU-take2-{os.getpid()}, NVIDIA H200, [N/A], 143771, [N/A]"
        """
    )
    bench.trainer("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    go = ("launch", "--tag", "cuda", "--startup-seconds", "30", "--json")
    document = bench(*go).document
    assert document["gpus"] == [{"index": 1, "uuid": f"GPU-take1-{os.getpid()}", "name": "NVIDIA H200", "memory_used_mib": 0}]
    assert (bench.run_folder("cuda-1") / "train.log").read_text() == f"GPU-take1-{os.getpid()}\n"
    busy = bench(*go, "--gpus", "0")
    assert busy.exit_code == 6
    assert "9000 MiB" in busy.document["error"]["message"]
    unknown = bench(*go, "--gpus", "2")
    assert unknown.exit_code == 7
    assert "[N/A]" in unknown.document["error"]["message"]
    assert not bench.run_folder("cuda-2").exists()


def test_a_gpu_is_held_before_its_memory_shows_it(bench) -> None:
    bench.experiment("cuda", "cuda:0")
    bench.nvidia_smi(
        f"""
        case "$1" in --query-compute-apps=*) exit 0;; esac
        echo "index, uuid, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%]"
        echo "0, GPU-held0-{os.getpid()}, NVIDIA H200, 0, 143771, 0"
        echo "1, GPU-held1-{os.getpid()}, NVIDIA H200, 0, 143771, 0"
        """
    )
    bench.trainer("import time; time.sleep(600)")
    bench("deploy")
    go = ("launch", "--tag", "cuda", "--startup-seconds", "0", "--json")
    racers = [bench.start(*go) for _ in range(2)]
    taken = [json.loads(racer.communicate(timeout=120)[0])["gpus"][0]["index"] for racer in racers]
    assert sorted(taken) == [0, 1]
    for more in ((), ("--gpus", "1")):
        refused = bench(*go, *more)
        assert refused.exit_code == 6
        assert "is held by run cuda-" in refused.document["error"]["message"]
    assert bench("stop", "cuda-1").exit_code == 0
    assert bench(*go).exit_code == 0


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", 7, "differ in version"),
        ("echo 'No devices were found'; exit 6", 3, "no GPU"),
        ("exec sleep 600", 7, "timed out"),
    ],
    ids=["mismatch", "none", "hang"],
)
def test_gpus_that_cannot_be_read_refuse_a_launch(bench, script: str, code: int, text: str) -> None:
    bench.experiment("cuda", "cuda:0")
    bench.nvidia_smi(script)
    done = bench("launch", "--tag", "cuda")
    assert done.exit_code == code
    assert text in done.stderr


def test_show_names_each_origin(bench) -> None:
    (bench.folder / "experiments/child.yaml").write_text("parent: quick\ntrainer: {optim: {lr: 3e-4}}\n")
    document = bench("show", "child", "--set", "batch.rows=2", "--json").document
    found = {row["key"]: (row["value"], row["origin"]) for row in document["values"]}
    assert found["optim.lr"] == (3e-4, "experiments/child.yaml")
    assert found["target.path"] == ("targets/x", "experiments/quick.yaml")
    assert found["batch.rows"] == (2, "--set")
    assert found["draft.num_layers"] == (5, "default")
    assert json.dumps(document)


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [
        ("import json; print('loading'); print(json.dumps({'go': True, 'reasons': []}))", 0, "quick-smoke-1: go"),
        ("import json, sys; print(json.dumps({'go': False, 'reasons': ['3 recompiles']})); sys.exit(1)", 1, "3 recompiles"),
        ("import sys; sys.exit('error: no such target')", 8, "no such target"),
        ("print('half a verd')", 8, "without a result"),
    ],
    ids=["go", "no-go", "dies", "silent"],
)
def test_smoke_is_a_run_with_a_verdict(bench, script: str, code: int, text: str) -> None:
    bench.trainer(script, "smoke.py")
    done = bench("smoke", "--tag", "quick")
    assert done.exit_code == code, done.stderr
    assert text in done.stdout + done.stderr
    if code < 2:
        assert bench("smoke", "--tag", "quick", "--json").document["go"] is (code == 0)
        assert bench("runs").stdout.startswith("quick-smoke-2\t")
        launched = bench("launch", "--tag", "quick", "--smoke", "--startup-seconds", "30")
        assert launched.exit_code == code
        assert bench.run_folder("quick-1").exists() is (code == 0)


def test_a_smoke_runs_numbers_are_short_and_what_is_unknown_is_a_dash(bench) -> None:
    stage = {
        "device": "cuda:1",
        "compile_s": 31.0312,
        "capture_s": None,
        "first_step_s": 0.00318102,
        "steady_step_s": 0.00325212,
    }
    found = {"go": True, "reasons": [], "stages": {"draft-0": stage}, "gpus": {"cuda:1": {"peak_gib": 0.478515625}}}
    bench.trainer(f"import json; print(json.dumps({found!r}))", "smoke.py")
    assert bench("smoke", "--tag", "quick").stdout.splitlines() == [
        "quick-smoke-1: go",
        "  draft-0 on cuda:1: compiled in 31 s, captured in -, first step 0.00318 s, later 0.00325 s",
        "  cuda:1: peak 0.479 GiB",
    ]


def test_gpus_are_not_taken_for_a_run_on_the_cpu(bench) -> None:
    done = bench("launch", "--tag", "quick", "--gpus", "0")
    assert (done.exit_code, "--gpus must be left out where nothing runs on a GPU, got 0" in done.stderr) == (3, True)
    assert not (bench.root / "runs").exists()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data.path=data/none", "data.path must be a folder of shards, got data/none: there is no {root}/data/none"),
        (
            "target.path=targets/none",
            "target.path must be a folder or a hub id, got targets/none: there is no {root}/targets/none",
        ),
    ],
)
def test_what_is_not_there_is_said_before_anything_starts(bench, setting: str, sentence: str) -> None:
    (bench.root / "targets").mkdir(parents=True)
    done = bench("launch", "--tag", "quick", "--set", setting)
    assert (done.exit_code, sentence.format(root=bench.root) in done.stderr) == (3, True)
    assert not (bench.root / "runs").exists()


def test_a_gguf_file_that_is_not_there_is_said_before_anything_starts(bench) -> None:
    (bench.root / "targets/tiny").mkdir(parents=True)
    done = bench("launch", "--tag", "quick", "--set", "target.path=targets/tiny", "--set", "target.gguf_file=none.gguf")
    sentence = f"target.gguf_file must be a file in {bench.root}/targets/tiny, got none.gguf"
    assert (done.exit_code, sentence in done.stderr) == (3, True)
    assert not (bench.root / "runs").exists()
