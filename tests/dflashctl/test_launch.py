"""`dflashctl launch`, `tail`, `status`, `stop`, `runs` on host local, with trainers that live, die, hang and chatter."""

import json
import os
import shutil
import signal
import subprocess
import venv
from pathlib import Path

import pytest

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


def launch(bench, *more: str, seconds: str = "0.3"):
    return bench("launch", "--tag", "quick", "--startup-seconds", seconds, "--json", *more)


def test_an_exit_0_inside_the_window_is_success(bench) -> None:
    done = launch(bench, seconds="30")
    assert done.exit_code == 0
    document = done.document
    assert (document["state"], document["exit_code"], document["gpus"]) == ("exited", 0, [])
    assert Path(document["log"]).read_text() == "hello from the trainer\n"
    assert (Path(document["run_dir"]) / "exit_code").read_text() == "0\n"
    assert "host local (default)" in done.stderr.splitlines()


def test_a_run_that_takes_its_time_to_appear_is_waited_for(bench) -> None:
    slow = bench.folder / "bin/setsid"
    slow.write_text('#!/bin/sh\nsleep 2\nexec /usr/bin/setsid "$@"\n')
    slow.chmod(0o755)
    bench.trainer("import time; time.sleep(600)")
    done = bench("launch", "--tag", "quick", "--startup-seconds", "0", "--json")
    assert (done.exit_code, done.document["state"]) == (0, "running")
    assert done.document["pid"] > 1


def test_death_in_the_window_shows_the_log(bench) -> None:
    bench.trainer("import sys; print('loading'); sys.exit('the target is not there')")
    done = bench("launch", "--tag", "quick", "--startup-seconds", "30")
    assert done.exit_code == 9
    assert "exit code 1" in done.stderr
    assert "loading\nthe target is not there" in done.stderr
    document = launch(bench, seconds="30").document
    assert document["error"]["code"] == "died_at_start"
    assert (document["run"], document["exit_code"]) == ("quick-2", 1)
    assert document["lines"][-1] == "the target is not there"


def test_death_by_a_signal_is_named(bench) -> None:
    bench.trainer("import os; os.kill(os.getpid(), 9)")
    done = launch(bench, seconds="30")
    assert done.exit_code == 9
    state = bench("status", "quick-1", "--json").document
    assert (state["state"], state["signal"], state["exit_code"]) == ("killed", 9, 137)


def test_a_run_lives_on_and_can_be_stopped_with_all_its_processes(bench) -> None:
    bench.trainer(
        """
        import os, signal, subprocess, sys, time
        deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
        stubborn = f"import signal, time; {deaf}; time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        subprocess.Popen([sys.executable, "-c", stubborn])
        subprocess.Popen(["setsid", sys.executable, "-c", stubborn], env={})
        subprocess.Popen(["setsid", sys.executable, "-c", stubborn])
        signal.signal(signal.SIGHUP, lambda *_: sys.exit("hangup"))
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    document = launch(bench).document
    assert document["state"] == "running"
    log = Path(document["log"])
    bench.until(lambda: log.read_text().count("deaf") == 3 and "ready" in log.read_text())
    family = [document["pid"], *bench.marked("quick-1")]
    unmarked = bench.until(lambda: _children_without_mark(family))
    assert len(family) == 5
    status = bench("status", "--json").document
    assert (status["state"], status["run"], status["pid"]) == ("running", "quick-1", document["pid"])
    done = bench("stop", "quick-1", "--grace", "1")
    assert done.exit_code == 0
    assert "stopped" in done.stdout
    assert not bench.marked("quick-1")
    assert not [pid for pid in [*family, *unmarked] if _alive(pid)]
    assert bench("status", "--json").document["state"] == "stopped"
    again = bench("stop", "quick-1")
    assert again.exit_code == 0
    assert "had already ended" in again.stdout


def _children_without_mark(family: list[int]) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) in family and int(path.parent.name) not in family:
            found.append(int(path.parent.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_stopping_one_run_leaves_its_twin_alone(bench) -> None:
    bench.trainer(SLEEPER)
    launch(bench)
    twin = launch(bench).document
    assert bench("stop", "quick-1").exit_code == 0
    assert _alive(twin["pid"])
    assert bench("status", "quick-2", "--json").document["state"] == "running"
    assert bench("stop", "local:quick-2").exit_code == 0


def test_two_launches_of_one_tag_keep_two_logs(bench) -> None:
    bench.trainer("import os; print('one')")
    launch(bench, seconds="30")
    bench.trainer("import os; print('two')")
    launch(bench, seconds="30")
    assert (bench.run_folder("quick-1") / "train.log").read_text() == "one\n"
    assert (bench.run_folder("quick-2") / "train.log").read_text() == "two\n"
    link = bench.root / "train_quick.log"
    assert link.is_symlink()
    assert link.read_text() == "two\n"


def test_two_launches_at_once_get_two_runs(bench) -> None:
    bench("deploy")
    racers = [bench.start("launch", "--tag", "quick", "--startup-seconds", "30", "--json") for _ in range(3)]
    documents = [json.loads(racer.communicate(timeout=120)[0]) for racer in racers]
    assert sorted(d["run"] for d in documents) == ["quick-1", "quick-2", "quick-3"]


def test_an_ordinary_file_with_the_logs_name_is_left_alone(bench) -> None:
    bench.root.mkdir()
    (bench.root / "train_quick.log").write_text("years of work")
    done = bench("launch", "--tag", "quick", "--startup-seconds", "30")
    assert done.exit_code == 0
    assert "ordinary file and was left alone" in done.stderr
    assert (bench.root / "train_quick.log").read_text() == "years of work"


def test_run_sh_by_hand_does_the_same(bench) -> None:
    bench.trainer("import os, sys; print(os.environ['TORCHINDUCTOR_CACHE_DIR'], sys.argv[1], os.getcwd(), __file__)")
    launch(bench, seconds="30")
    folder = bench.run_folder("quick-1")
    once = (folder / "train.log").read_text()
    subprocess.run(["sh", folder / "run.sh"], env={"PATH": os.environ["PATH"]}, cwd="/", check=True, timeout=30)
    bench.until(lambda: (folder / "train.log").read_text() == once * 2 and (folder / "exit_code").exists())
    assert once.startswith(f"{folder}/cache/inductor {folder}/config.json {folder} {bench.root}/releases/")
    assert not (folder / "cache").exists()


def test_a_living_run_is_not_started_twice_by_hand(bench) -> None:
    bench.trainer(SLEEPER)
    pid = launch(bench).document["pid"]
    script = bench.run_folder("quick-1") / "run.sh"
    done = subprocess.run(["sh", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr == f"quick-1 is running, pid {pid}\n"


def test_a_pid_that_now_belongs_to_a_stranger_is_lost(bench) -> None:
    bench.trainer(SLEEPER)
    pid = launch(bench).document["pid"]
    for member in [pid, *bench.marked("quick-1")]:
        os.kill(member, signal.SIGKILL)
    bench.until(lambda: not _alive(pid))
    assert bench("status", "--json").document["state"] == "lost"
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        start, init = (bench.run_folder("quick-1") / "pid").read_text().split()[1:]
        (bench.run_folder("quick-1") / "pid").write_text(f"{stranger.pid} {start} {init}\n")
        state = bench("status", "--json").document
        assert (state["state"], state["exit_code"]) == ("lost", None)
        assert "had already ended" in bench("stop", "quick-1").stdout
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(timeout=10)
    assert "lost" in bench("status").stdout
    assert bench("tail").exit_code == 1


def test_follow_ends_with_the_run_and_with_its_verdict(bench) -> None:
    bench.trainer("import time, sys\nfor i in range(3): print('line', i); time.sleep(1)\nsys.exit(7)")
    done = bench("launch", "--tag", "quick", "--startup-seconds", "0", "--follow")
    assert done.exit_code == 1
    assert done.stdout.endswith("line 0\nline 1\nline 2\n")
    assert "exited 7" in done.stderr
    assert bench("tail", "quick-1").exit_code == 1
    followed = launch(bench, "--follow", seconds="0")
    assert followed.exit_code == 1
    assert followed.document["exit_code"] == 7


def test_ctrl_c_in_tail_leaves_the_run_and_the_history_alone(bench) -> None:
    bench.trainer(SLEEPER)
    pid = launch(bench).document["pid"]
    before = (bench.folder / "state/history.jsonl").read_bytes()
    process = bench.start("tail")
    assert process.stdout
    assert process.stdout.readline() == b"up\n"
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"goes on" in stderr
    assert b"Traceback" not in stderr
    assert _alive(pid)
    assert (bench.folder / "state/history.jsonl").read_bytes() == before


def test_tail_shows_the_last_lines(bench) -> None:
    bench.trainer("print('\\n'.join(str(i) for i in range(100)))")
    launch(bench, seconds="30")
    assert bench("tail", "-n", "3", "--no-follow").stdout == "97\n98\n99\n"
    assert bench("tail", "-n", "0", "--no-follow").stdout == ""


def test_a_chatty_run_is_followed_to_its_last_byte(bench) -> None:
    bench.trainer("import sys\nfor i in range(300_000): sys.stdout.write(f'line {i} of much\\n')\nprint('the end')")
    done = bench("launch", "--tag", "quick", "--startup-seconds", "0", "--follow")
    assert done.exit_code == 0
    text = done.stdout[done.stdout.index("line 0 ") :]
    assert text == "".join(f"line {i} of much\n" for i in range(300_000)) + "the end\n"


def test_many_lines_are_all_shown(bench) -> None:
    bench.trainer("for i in range(300_000): print('line', i)")
    launch(bench, seconds="60")
    lines = bench("tail", "-n", "200000", "--no-follow").stdout.splitlines()
    assert (len(lines), lines[0], lines[-1]) == (200_000, "line 100000", "line 299999")


def test_a_closed_pipe_is_no_accident(bench) -> None:
    bench.trainer("print('x\\n' * 500_000)")
    launch(bench, seconds="60")
    done = subprocess.run(
        ["sh", "-c", f"'{bench.executable}' tail -n 400000 --no-follow | head -1"],
        cwd=bench.folder,
        env=bench.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "x\n"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_no_torch_at_that_interpreter(bench) -> None:
    venv.create(bench.folder / "bare", with_pip=False)
    bench.hosts(
        f"hosts:\n  local: {{transport: local, root: .dflash, python: {bench.folder}/bare/bin/python}}\ndefault: local\n"
    )
    done = launch(bench)
    assert done.exit_code == 8
    assert f"no torch, transformers, safetensors, numpy at {bench.folder}/bare/bin/python" in done.document["error"]["message"]
    assert not (bench.root / "runs").exists()
    assert bench("runs").stdout == ""


def test_no_deploy_runs_what_is_there(bench) -> None:
    refused = bench("launch", "--tag", "quick", "--no-deploy")
    assert refused.exit_code == 8
    assert "has no release" in refused.stderr
    bench("deploy")
    bench.trainer("print('newer')")
    document = launch(bench, "--no-deploy", seconds="30").document
    assert Path(document["log"]).read_text() == "hello from the trainer\n"


def test_a_run_works_out_of_its_own_release(bench) -> None:
    bench.trainer("NAME = 'first'", "late.py")
    bench.trainer(
        """
        import pathlib, sys, time
        print("up", flush=True)
        while not pathlib.Path(sys.argv[1] + ".go").exists():
            time.sleep(0.02)
        import trainer.late as late
        print(late.NAME)
        """
    )
    document = launch(bench).document
    bench.trainer("NAME = 'second'", "late.py")
    bench("deploy")
    Path(document["run_dir"], "config.json.go").touch()
    assert bench("tail", "-n", "5").stdout == "up\nfirst\n"


def test_runs_lists_newest_first_and_a_second_laptop_learns_them(bench) -> None:
    bench.experiment("other")
    launch(bench, seconds="30")
    bench("launch", "--tag", "other", "--startup-seconds", "30")
    lines = bench("runs").stdout.splitlines()
    assert [line.split("\t")[:4] for line in lines] == [
        ["other-1", "local", "exited", "0"],
        ["quick-1", "local", "exited", "0"],
    ]
    bench.env["DFLASHCTL_STATE_DIR"] = str(bench.folder / "second laptop")
    assert bench("runs").stdout == ""
    assert bench("status", "quick-1").exit_code == 10
    assert bench("status", "local:quick-1", "--json").document["exit_code"] == 0
    assert {r["run"] for r in bench("runs", "--refresh", "--json").document["runs"]} == {"quick-1", "other-1"}


def test_a_torn_history_line_is_passed_over_and_said(bench) -> None:
    launch(bench, seconds="30")
    path = bench.folder / "state/history.jsonl"
    path.write_bytes(path.read_bytes() + b'{"schema": 1, "launch_id": "tor')
    listed = bench("runs")
    assert "quick-1" in listed.stdout
    assert "1 unreadable line(s)" in listed.stderr
    launch(bench, seconds="30")
    assert "quick-2" in bench("runs").stdout


def test_prefixes_are_unique_or_refused(bench) -> None:
    bench.experiment("quicker")
    for tag in ("quick", "quicker", "quick"):
        bench("launch", "--tag", tag, "--startup-seconds", "30")
    assert bench("status", "quicker", "--json").document["run"] == "quicker-1"
    assert bench("status", "quick-1", "--json").document["run"] == "quick-1"
    refused = bench("status", "quick")
    assert refused.exit_code == 10
    assert "local:quick-1, local:quick-2, local:quicker-1" in refused.stderr


def test_startup_survives_a_trainer_that_prints_megabytes_on_both_streams(bench) -> None:
    bench.trainer("import sys\nsys.stderr.write('e' * 6_000_000)\nsys.stdout.write('o' * 6_000_000)")
    assert launch(bench, seconds="60").exit_code == 0


def test_the_run_sees_its_environment_and_no_gpu(bench) -> None:
    bench.hosts('hosts:\n  local: {transport: local, root: .dflash, env: {GREETING: "it\'s $HOME `x`"}}\ndefault: local\n')
    bench.trainer("import os; print([os.environ[k] for k in ('GREETING', 'CUDA_VISIBLE_DEVICES', 'CUDA_DEVICE_ORDER')])")
    log = Path(launch(bench, seconds="30").document["log"]).read_text()
    assert log == "[\"it's $HOME `x`\", '', 'PCI_BUS_ID']\n"


@pytest.mark.parametrize("startup", ["-1", "soon"])
def test_startup_seconds_must_be_a_number(bench, startup: str) -> None:
    assert bench("launch", "--tag", "quick", "--startup-seconds", startup).exit_code == 2


def test_a_deleted_root_or_another_project_confuses_nobody(bench) -> None:
    launch(bench, seconds="30")
    shutil.rmtree(bench.root)
    done = bench("launch", "--tag", "quick", "--startup-seconds", "0", "--follow")
    assert done.exit_code == 0, done.stderr
    other = bench.folder / "another project"
    (other / "experiments").mkdir(parents=True)
    assert subprocess.run([bench.executable, "status"], cwd=other, env=bench.env, capture_output=True).returncode == 10
    assert bench("status", "local:quick-1").exit_code == 0


def test_a_number_is_not_given_twice_and_a_stranger_of_that_name_is_not_stopped(bench) -> None:
    launch(bench, seconds="30")
    shutil.rmtree(bench.run_folder("quick-1"))
    bench.trainer(SLEEPER)
    assert launch(bench).document["run"] == "quick-2"
    bench.run_folder("quick-2").rename(bench.run_folder("quick-1"))
    done = bench("stop", "quick-1")
    assert done.exit_code == 10
    assert "is another one now" in done.stderr
    assert bench.marked("quick-1")


def test_ctrl_c_in_the_start_up_window_names_the_run_that_goes_on(bench) -> None:
    bench.trainer(SLEEPER)
    bench("deploy")
    process = bench.start("launch", "--tag", "quick", "--startup-seconds", "60", "--json")
    bench.until(lambda: (bench.run_folder("quick-1") / "pid").exists())
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert json.loads(stdout)["error"]["code"] == "interrupted"
    assert "quick-1 has started" in json.loads(stdout)["error"]["message"]
    assert bench("status", "--json").document["state"] == "running"


@pytest.mark.parametrize(("code", "state", "signal_"), [(255, "exited", None), (200, "exited", None), (139, "killed", 11)])
def test_large_exit_codes_are_no_signals(bench, code: int, state: str, signal_: int | None) -> None:
    bench.trainer(f"import sys; sys.exit({code})")
    launch(bench, seconds="30")
    found = bench("status", "--json").document
    assert (found["state"], found["exit_code"], found["signal"]) == (state, code, signal_)


@pytest.mark.parametrize("name", ["pid", "exit_code", "events.jsonl", "run.json"])
def test_a_damaged_file_blinds_nobody(bench, name: str) -> None:
    for _ in range(2):
        launch(bench, seconds="30")
    for content in (b"", b"abc 1 2", b"[" * 100_000, b"\xff\xfe\0", b'{"event": "step", "step": NaN}'):
        (bench.run_folder("quick-1") / name).write_bytes(content)
        assert bench("status", "quick-1", "--json").document["run"] == "quick-1"
    listed = {run["run"]: run["state"] for run in bench("runs", "--refresh", "--json").document["runs"]}
    assert listed["quick-2"] == "exited"
    assert launch(bench, "--warm-cache", seconds="30").exit_code == 0


def test_a_run_whose_record_is_gone_is_still_stopped_whole_and_keeps_its_release(bench) -> None:
    bench.trainer(
        "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '600']); print('up', flush=True); time.sleep(600)"
    )
    release = launch(bench).document["release"]
    bench.until(lambda: len(bench.marked("quick-1")) == 2)
    processes = bench.marked("quick-1")
    (bench.run_folder("quick-1") / "run.json").write_text("garbage")
    for number in range(4):
        bench.trainer(f"print({number})")
        bench("deploy")
    assert (bench.root / "releases" / release).is_dir()
    assert bench("stop", "quick-1").exit_code == 0
    assert not [pid for pid in processes if _alive(pid)]


def test_a_full_disk_at_the_end_still_tells_the_exit_code(bench, tmpfs) -> None:
    root = tmpfs("size=512k")
    bench.hosts(f"hosts:\n  local: {{transport: local, root: {root}}}\ndefault: local\n")
    bench.trainer("open('checkpoint', 'wb').write(b'x' * 1_000_000)")
    assert launch(bench, seconds="30").exit_code == 9
    state = bench("status", "--json").document
    assert (state["state"], state["exit_code"]) == ("exited", 1)


def test_a_path_of_the_runs_own_does_not_take_the_wrappers_tools_away(bench) -> None:
    bench.hosts("hosts:\n  local: {transport: local, root: .dflash, env: {PATH: /nowhere}}\ndefault: local\n")
    bench.trainer("import os; print(os.environ['PATH'])")
    assert launch(bench, seconds="30").document["state"] == "exited"
    assert (bench.run_folder("quick-1") / "train.log").read_text() == "/nowhere\n"


def test_two_starts_by_hand_at_once_make_one_run(bench) -> None:
    bench.trainer("import os, time\nprint('one', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)")
    go = bench.run_folder("quick-1") / "go"
    launch(bench, seconds="0")
    go.touch()
    bench.until(lambda: bench("status", "--json").document["state"] == "exited")
    go.unlink()
    script = bench.run_folder("quick-1") / "run.sh"
    starters = [subprocess.Popen(["sh", script], stderr=subprocess.DEVNULL) for _ in range(4)]
    assert sorted(starter.wait(timeout=30) for starter in starters) == [0, 1, 1, 1]
    go.touch()
    bench.until(lambda: bench("status", "--json").document["state"] == "exited")
    assert (bench.run_folder("quick-1") / "train.log").read_text() == "one\n" * 2


def test_stopping_a_claimed_run_keeps_it_from_starting(bench) -> None:
    launch(bench, seconds="30")
    folder = bench.run_folder("quick-1")
    for name in ("pid", "exit_code"):
        (folder / name).unlink()
    (folder / "run.json").touch()
    done = bench("stop", "quick-1")
    assert done.exit_code == 0, done.stderr
    assert (folder / "stopped").exists()
    subprocess.run(["sh", folder / "run.sh", "detached"], cwd=folder, timeout=30)
    assert (folder / "train.log").read_text() == "hello from the trainer\n"


def test_outputs_that_cannot_be_written_are_no_traceback(bench) -> None:
    bench.trainer("print('gr\u00fcn')")
    launch(bench, seconds="30")
    for command, code in (("runs >&-", 0), ("runs > /dev/full", 8), ("runs | true", 0), ("tail --no-follow 2>&-", 0)):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"'{bench.executable}' {command}"],
            cwd=bench.folder,
            env=bench.env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, (command, done)
        assert "Traceback" not in done.stderr
    bench.env["PYTHONIOENCODING"] = "ascii"
    assert bench("tail", "--no-follow").stdout == "gr\u00fcn\n"
