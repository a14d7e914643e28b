"""The `gradbox` command: its output, its exit codes, and who joins it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import termios
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradbox import Gradient, GradResult, Jacobian, PerSampleGradient
from gradbox.cli import main
from gradbox.cli.commands import LazyCommand, entries, line_of
from gradbox.cli.jobs import _state, how_far
from gradbox.cli.output import ago, brief, duration
from gradbox.cli.top import (
    DEVICE_TITLES,
    GIB,
    NARROW_TITLES,
    device_rows,
    headline,
    job_rows,
)
from gradbox.protocol import (
    BoxJob,
    BoxView,
    CallerView,
    DeviceMemory,
    DeviceView,
    JobState,
    OperationMode,
    OperationView,
    ProgressView,
)
from gradbox.settings import login_file
from tests.boxes import TestBox, new_token
from tests.client.wires import job_view


@pytest.fixture
def at_box(real: TestBox, monkeypatch: pytest.MonkeyPatch) -> TestBox:
    monkeypatch.setenv("GRADBOX_URL", real.url)
    monkeypatch.setenv("GRADBOX_TOKEN", real.token)
    return real


def submitted(box: TestBox, **given: object) -> str:
    fields = {
        "model": "mlp",
        "inputs": [torch.ones(2, 5).double()],
        "loss": lambda z: z.sum(),
        **given,
    }
    with box.client() as client:
        return client.submit(Gradient(**fields)).id


def test_blobs_are_listed_and_deleted(
    at_box: TestBox, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert at_box.data is not None
    token = new_token(at_box.data, "mary")
    monkeypatch.setenv("GRADBOX_TOKEN", token)
    waiting = {"model": "slow", "inputs": [torch.rand(1, 3) for _ in range(200)]}
    with at_box.client(token) as client:
        job = client.submit(Gradient(loss=lambda z: z.sum(), **waiting))
        (needed,) = client.blobs()
        assert main(["blobs", "delete", needed.digest]) == 1
        assert f"job {job.id} needs blob" in capsys.readouterr().err
        assert main(["blobs", "delete", "--all", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"deleted": []}
        job.cancel()
        job.wait()
        assert main(["blobs", "list", "--json"]) == 0
        (listed,) = json.loads(capsys.readouterr().out)
        assert listed["digest"] == needed.digest
        assert listed["size_bytes"] == needed.size_bytes
        assert main(["blobs", "list"]) == 0
        assert needed.digest in capsys.readouterr().out
        assert main(["blobs", "delete", needed.digest]) == 0
        assert client.blobs() == []
        assert main(["blobs", "list"]) == 0
        assert capsys.readouterr().out.endswith("no blobs\n")
        again = client.submit(Gradient(loss=lambda z: z.sum(), **waiting))  # is sent once more
        again.cancel()
        again.wait()
        assert main(["blobs", "delete"]) == 2
        assert main(["blobs", "delete", "all"]) == 2


def test_jobs_are_listed_shown_and_watched(
    at_box: TestBox, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(at_box, name="listed")
    assert main(["jobs", "watch", job_id]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "done"
    assert main(["jobs", "list"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if job_id in line)
    assert {"done", "mlp", "listed"} <= set(line.split())
    assert main(["jobs", "list", "--json", "--state", "done", "--limit", "1"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["id"] == job_id
    assert main(["jobs", "show", job_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "listed"


def test_a_name_cannot_write_to_the_terminal_or_forge_a_line(
    at_box: TestBox, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(at_box, name="\x1b[2J\n\u202edone")
    with at_box.client() as client:
        client.job(job_id).wait()
    for words in (["list"], ["list", "--json"], ["show", job_id], ["show", job_id, "--json"]):
        assert main(["jobs", *words]) == 0
        shown = capsys.readouterr().out
        assert not {"\x1b", "\u202e"} & set(shown), words
        assert sum("done" in line and "u202e" in line for line in shown.splitlines()) == 1, words


def test_a_result_is_fetched_into_a_file(
    at_box: TestBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grads.safetensors"
    assert main(["result", submitted(at_box), "-o", str(path)]) == 0
    assert "loss" in capsys.readouterr().out
    assert len(GradResult.load(path).grads) == 6


def test_standard_output_takes_no_result(
    at_box: TestBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["result", submitted(at_box), "-o", "-"]) == 2
    assert not list(tmp_path.iterdir())


def test_rows_that_were_reduced_are_named_by_how(
    at_box: TestBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with at_box.client() as client:
        norms = Jacobian(model="mlp", inputs=[torch.ones(2, 5).double()], reduce="norm")
        job_id = client.submit(norms).id
    assert main(["result", job_id, "-o", str(tmp_path / "norms")]) == 0
    assert capsys.readouterr().out.strip().endswith("norms: norm")


def test_a_failed_job_is_exit_code_1(
    at_box: TestBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(at_box, loss=lambda z: z.sum(1))
    assert main(["jobs", "watch", job_id]) == 1
    assert main(["result", job_id, "-o", str(tmp_path / "x")]) == 1
    assert "loss-not-scalar" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_problem_is_shown_in_its_own_lines(
    at_box: TestBox, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(at_box, loss=lambda z: z @ z.new_ones((99, 3)))
    assert main(["jobs", "watch", job_id]) == 1
    capsys.readouterr()
    assert main(["jobs", "show", job_id]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith(" " * 13) and "hint: " in line for line in shown)
    assert not any("\\n" in line for line in shown)


def test_cancelling_says_what_became_of_the_job(
    at_box: TestBox, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(at_box, model="slow", inputs=[torch.ones(1, 3)] * 200)
    assert main(["jobs", "cancel", job_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["cancel_requested"] is True
    assert main(["jobs", "watch", job_id]) == 1
    capsys.readouterr()
    assert main(["jobs", "show", job_id]) == 0
    assert f"{'state':<16} cancelled\n" in capsys.readouterr().out


def test_the_beginning_of_an_id_means_its_job(
    at_box: TestBox, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(at_box)
    assert main(["jobs", "watch", job_id[:10]]) == 0
    capsys.readouterr()
    submitted(at_box)
    assert main(["jobs", "show", ""]) == 2
    said = capsys.readouterr().err
    assert "begin:" in said
    assert job_id in said


def test_the_owner_lists_everybodys_jobs_and_no_user_does(
    at_box: TestBox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADBOX_TOKEN", at_box.other_token)
    with at_box.client(at_box.other_token) as client:
        graces = client.submit(
            Gradient(model="mlp", inputs=[torch.ones(2, 5).double()], loss=lambda z: z.sum())
        ).id
    assert main(["jobs", "list", "--all"]) == 2
    assert "only the box's owner" in capsys.readouterr().err
    monkeypatch.setenv("GRADBOX_TOKEN", at_box.token)
    assert main(["jobs", "list", "--all"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if graces in line)
    assert "grace" in line.split()
    assert main(["jobs", "show", graces[:16], "--json"]) == 0


def test_top_and_workers_show_the_devices_and_who_works_for_whom(
    at_box: TestBox, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(at_box, model="slow", inputs=[torch.ones(1, 3)] * 200, name="long")
    with at_box.client() as client:
        job = client.job(job_id)
        while job.state == "queued":
            time.sleep(0.02)
    assert main(["top", "--once"]) == 0
    said = capsys.readouterr().out
    assert "1 running" in said
    assert job_id[:12] in said
    assert "worker-0-cpu" in said
    assert main(["top", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operation"]["mode"] == "running"
    assert main(["workers", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)
    assert device["device"] == "cpu"
    assert main(["jobs", "cancel", job_id[:12]]) == 0


def test_colour_is_for_terminals_that_want_it(at_box: TestBox) -> None:
    submitted(at_box)

    def on_a_terminal(**environment: str) -> str:
        terminal, end = pty.openpty()
        command = [sys.executable, "-m", "gradbox", "jobs", "list", "--limit", "1"]
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", **environment}
        subprocess.run(command, stdout=end, env=env, check=True, timeout=500)
        os.close(end)
        said = os.read(terminal, 65536).decode()
        os.close(terminal)
        return said

    assert "\x1b[" in on_a_terminal()
    assert "\x1b[" not in on_a_terminal(NO_COLOR="1")


def test_top_draws_on_a_terminal_until_ctrl_c(at_box: TestBox) -> None:
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gradbox", "top", "--every", "0.2"],
        stdout=end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"},
        # A suite that runs in the background has Ctrl-C ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(end)
    said = ""
    while said.count("worker-0-cpu") < 2:
        said += os.read(terminal, 65536).decode(errors="replace")
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # its end of the terminal is closed
        while os.read(terminal, 65536):
            pass
    assert process.wait(30) == 0
    os.close(terminal)
    assert at_box.url in said


def test_top_fits_a_hundred_columns_and_leaves_on_q(at_box: TestBox) -> None:
    client = at_box.client(at_box.other_token)
    shards = [torch.ones(1, 3)] * 600
    slow = [
        client.submit(PerSampleGradient(model="slow", inputs=shards, loss=lambda z: z.sum(1)))
        for _ in range(3)
    ]
    while slow[0].state == "queued":
        time.sleep(0.02)
    terminal, end = pty.openpty()
    attributes = termios.tcgetattr(end)
    process = subprocess.Popen(
        [sys.executable, "-m", "gradbox", "top", "--every", "30"],
        stdin=end,
        stdout=end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
    )
    said = ""
    while slow[-1].id[:12] not in said:
        said += os.read(terminal, 65536).decode(errors="replace")
    os.write(terminal, b"xq")
    assert process.wait(60) == 0  # and not after 30 s
    assert termios.tcgetattr(end) == attributes
    for descriptor in (terminal, end):
        os.close(descriptor)
    lines = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", said).split("\r\n")
    assert any("per_sample_gradient  since " in line for line in lines)
    assert [line for line in lines if len(line.rstrip()) > 100 or "…" in line] == []
    for job in reversed(slow):
        job.cancel()
    client.close()


def test_what_waits_says_since_when_and_when_it_begins() -> None:
    device = DeviceView(
        worker="gpu-server-cuda-0",
        device="cuda:0",
        hardware="NVIDIA H100 80GB HBM3",
        state="busy",
        started_s=0.0,
        job="runs",
        memory=DeviceMemory(total_bytes=80 * GIB, used_bytes=int(35.94 * GIB)),
        busy=[100] * 60,
        busy_share=1.0,
    )
    waits = BoxJob(
        key="waits",
        owner="grace",
        computation="per_sample_gradient",
        model="clip-vit-l14",
        state=JobState.QUEUED,
        created_s=975.0,
        position=1,
        begins_s=1050.4,
        id="3c9e1f7a04d82b63",
    )
    progress = ProgressView(phase="replay", done=41, total=64, seconds_left=44.0)
    begun = {"key": "runs", "state": JobState.RUNNING, "position": None, "progress": progress}
    you = CallerView(name="root", admin=True)
    counts = {"num_running": 1, "num_queued": 2}
    box = BoxView(
        now_s=1000.0,
        gradbox="0.1.0",
        you=you,
        jobs=[waits.model_copy(update=update) for update in (begun, {}, {"begins_s": None})],
        devices=[device],
        models=[],
        **counts,
    )
    said = [row[-1] for row in job_rows(box)]
    assert said[1:] == [
        "replay 41/64, 44 s left",
        "since 25 s, begins in about 50 s",
        "since 25 s",
    ]
    for rows in (device_rows(box, titles=NARROW_TITLES), job_rows(box)):
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        assert sum(widths) + 2 * (len(widths) - 1) <= 100
    assert len(device_rows(box)[1]) == len(DEVICE_TITLES)
    held = OperationView(mode=OperationMode.PAUSED, by="root", reason="new driver")
    paused = box.model_copy(update={"operation": held})
    assert job_rows(paused)[2][-1] == "since 25 s, the box is paused"
    assert headline(paused, url="http://x").endswith("\nthe box is paused by root: new driver")


def completed(words: str) -> subprocess.CompletedProcess[str]:
    """Return what bash is told when Tab is pressed behind these words."""
    return subprocess.run(
        [sys.executable, "-m", "gradbox"],
        env={
            **os.environ,
            "_GRADBOX_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": "3",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


def test_ids_of_jobs_are_completed(at_box: TestBox) -> None:
    job_id = submitted(at_box)
    assert job_id[:12] in completed(f"gradbox jobs show {job_id[:6]}").stdout.splitlines()
    assert job_id[:20] in completed(f"gradbox jobs show {job_id[:20]}").stdout.splitlines()


def test_names_of_models_are_completed(at_box: TestBox) -> None:
    assert "mlp" in completed("gradbox models show ml").stdout.splitlines()


@pytest.mark.parametrize("words", ["gradbox jobs show a", "gradbox models show m"])
def test_a_box_that_does_not_answer_completes_nothing(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("GRADBOX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("GRADBOX_TOKEN", "t")
        found = completed(words)
    assert (found.stdout.strip(), found.stderr) == ("", "")


def test_a_job_that_waits_is_shown_with_whom_it_waits_for() -> None:
    waits = {"queue_position": 3, "waiting_for": {"ann": 2}, "seconds_left": 200.0}
    view = job_view(JobState.QUEUED).model_copy(update=waits)
    assert how_far(view) == "position 3, begins in 3 min"
    held = view.model_copy(update={"hold": "paused by ann"})
    assert how_far(held) == "position 3, the box is paused by ann"
    assert _state(view) == "queued, position 3, after 2 of ann, begins in 3 min"


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(0.4, "0 s"), (59, "59 s"), (200, "3 min"), (3840, "1 h 04 min"), (190_000, "2 d 4 h")],
)
def test_durations_have_two_units_at_most(seconds: float, says: str) -> None:
    assert duration(seconds) == says
    assert ago(1000.0, now_s=1000.0 + seconds) == f"{says} ago"


def test_what_is_over_within_seconds_took_more_than_nothing() -> None:
    assert [brief(seconds) for seconds in (0.021, 2.54, 75)] == ["21 ms", "2.5 s", "1 min"]


def test_a_mistyped_command_names_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["jbos"]) == 2
    assert "Did you mean 'jobs'" in capsys.readouterr().err
    assert main(["jobs", "lits"]) == 2
    assert "Did you mean 'list'?" in capsys.readouterr().err


def test_wrong_usage_is_exit_code_2(at_box: TestBox, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "show", "no-such-job"]) == 2
    assert "gradbox jobs list" in capsys.readouterr().err
    for arguments in (["jobs"], ["explode"], ["result", "x"]):
        assert main(arguments) == 2


def test_what_a_call_says_that_the_box_refuses_is_exit_code_2(
    at_box: TestBox, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobs", "list", "--limit", "0"]) == 2
    assert "limit" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_exit_code_2(
    at_box: TestBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(at_box)
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "f", tmp_path / "file" / "f", tmp_path):
        assert main(["result", job_id, "-o", str(path)]) == 2
        assert f"got {path}: " in capsys.readouterr().err


def test_a_job_that_failed_by_its_inputs_is_exit_code_1(
    at_box: TestBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(at_box, output="no-such-output")
    assert main(["result", job_id, "-o", str(tmp_path / "x")]) == 1
    assert "invalid-inputs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "token", "says"),
    [
        ("http://127.0.0.1:abc", "t", "such as http://127.0.0.1:8642, got 'http://127.0.0.1:abc'"),
        ("ftp://box", "t", "does not begin with http://"),
        ("http://127.0.0.1:9", "tökén", "printable ASCII"),
    ],
)
def test_settings_that_cannot_be_used_are_exit_code_2(
    url: str,
    token: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GRADBOX_URL", url)
    monkeypatch.setenv("GRADBOX_TOKEN", token)
    assert main(["jobs", "list"]) == 2
    assert says in (said := capsys.readouterr().err)
    assert token not in said.split()


@pytest.mark.parametrize(
    "arguments",
    [[], ["--url", "http://box"], ["--url", "http://box", "--token", "-"]],
    ids=["url", "token", "token on stdin"],
)
def test_a_login_whose_input_ends_is_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradbox", "login", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        start_new_session=True,  # without a terminal to ask on
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "give --url URL, and --token -" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_box_that_is_not_there_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADBOX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("GRADBOX_TOKEN", "t")
    assert main(["jobs", "list"]) == 3
    assert "http://127.0.0.1:9" in capsys.readouterr().err


def test_login_keeps_a_token_that_the_box_knows(
    real: TestBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["login", "--url", real.url, "--token", "gbx_wrong"]) == 2
    assert not login_file().exists()
    assert main(["login", "--url", real.url, "--token", real.token]) == 0
    assert stat.S_IMODE(login_file().stat().st_mode) == 0o600
    monkeypatch.delenv("GRADBOX_URL", raising=False)
    monkeypatch.delenv("GRADBOX_TOKEN", raising=False)
    assert main(["jobs", "list"]) == 0


def test_a_command_whose_packages_are_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        raise ModuleNotFoundError("No module named 'redis'", name="redis")

    entry = SimpleNamespace(name="up", module="gradbox_service.commands.up", load=load)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    assert main(["up", "--port", "0"]) == 2
    assert "redis" in (said := capsys.readouterr().err)
    assert "pip install 'gradbox[service]'" in said


def test_listing_jobs_loads_no_server(real: TestBox) -> None:
    code = (
        "import sys; from gradbox.cli import main; main(['version']);"
        "print(sorted({'fastapi', 'redis', 'torch', 'gradbox_service'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_command_stands_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == main(["jobs", "list", "-h"]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    joined = {entry.name for entry in metadata.entry_points(group="gradbox.commands")}
    assert all(f"\n  {name} " in text for name in joined | {"jobs", "result", "login"})


def test_the_help_loads_no_command() -> None:
    code = (
        "import sys; from gradbox.cli import main; main(['--help'])\n"
        "print(sorted({'gradbox.cli.jobs', 'gradbox_service', 'gradbox_worker', 'rich', 'pydantic'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_overview_says_of_each_command_what_the_command_says() -> None:
    for name, entry in entries().items():
        assert LazyCommand(entry).loaded().help == line_of(name), name


def test_a_command_whose_extra_is_missing_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        f"from gradbox.cli import main; sys.exit(main(['up', '--data', {str(tmp_path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "gradbox: up needs uvicorn, which is not installed: pip install 'gradbox[service]'\n"
    )


def test_a_full_disk_behind_stdout_is_said_in_one_line(at_box: TestBox) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "gradbox", "jobs", "list"], stdout=full, stderr=subprocess.PIPE
        )
    assert ended.returncode == 2
    assert b"cannot be written: No space left on device" in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_a_closed_stdout_is_no_error(at_box: TestBox) -> None:
    command = f"{sys.executable} -m gradbox jobs list >&-"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, b"")
