"""Progress of jobs, uploads and downloads, and what of it a notebook shows."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import nbformat
import pytest
import torch
from nbclient import NotebookClient

from gradbox import Gradient
from gradbox.progress import ProgressBar, _left
from gradbox.protocol import JobState, ResultView
from tests.boxes import TestBox
from tests.client.wires import answer, client_of, job_view

MIB = 2**20


def large() -> Gradient:
    shard = torch.zeros(20 * MIB // 8 // 5, 5, dtype=torch.float64)
    return Gradient(model="m", inputs=[shard], loss=lambda z: z.sum(), name="large")


def test_an_upload_shows_its_mib(capsys: pytest.CaptureFixture[str]) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404) if request.method == "HEAD" else answer(job_view())

    client_of(handler).submit(large())
    assert capsys.readouterr().err == ""
    client_of(handler).submit(large(), progress=True)
    shown = capsys.readouterr().err
    assert "large: uploading, MiB" in shown
    assert "20/20" in shown


def test_a_small_upload_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    computation = Gradient(model="m", inputs=[torch.ones(2, 5)], loss=lambda z: z.sum())
    client_of(lambda request: answer(job_view())).submit(computation, progress=True)
    assert capsys.readouterr().err == ""


def test_a_download_shows_its_mib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = bytes(17 * MIB)
    result = ResultView(size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())

    def handler(request: httpx.Request) -> httpx.Response:
        fetched = request.url.path.endswith("/result")
        view = job_view(JobState.DONE, result=result)
        return httpx.Response(200, content=body) if fetched else answer(view)

    client_of(handler).job("j1").fetch(tmp_path / "result", progress=True)
    assert "fetching, MiB" in (shown := capsys.readouterr().err)
    assert "17/17" in shown


def test_a_transfer_tells_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 1000, 5))
    # Of this module alone: the threads of a box in this process have the true time.
    clock = SimpleNamespace(monotonic=lambda: float(next(now)))
    monkeypatch.setattr("gradbox.progress.time", clock)
    with ProgressBar("job", shown=True) as bar:
        for have in range(0, 101, 20):
            bar.show_upload(have * MIB, 100 * MIB)
    assert "s left" in capsys.readouterr().err


def test_a_job_that_waits_shows_for_whom_and_how_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LINES", "24")
    waits = {"queue_position": 3, "waiting_for": {"ann": 2, "bob": 1}, "seconds_left": 41.0}
    view = job_view(JobState.QUEUED).model_copy(update=waits)
    with ProgressBar("job", shown=True) as bar:
        bar.show_view(view)
    shown = capsys.readouterr().err
    assert "queued, position 3, after 2 of ann, 1 of bob" in shown
    assert "begins in 41 s" in shown
    assert "ann 2, bob 1" in view._repr_html_()


def test_a_job_that_is_held_shows_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    held = {"queue_position": 3, "waiting_for": {"ann": 2}, "hold": "paused by root: new driver"}
    view = job_view(JobState.QUEUED).model_copy(update=held)
    with ProgressBar("job", shown=True) as bar:
        bar.show_view(view)
    assert "queued, position 3, the box is paused by root: new driver" in capsys.readouterr().err
    assert "paused by root: new driver" in view._repr_html_()


@pytest.mark.parametrize(
    ("seconds", "said"), [(59.6, "60 s left"), (600, "10 min left"), (9000, "2.5 h left")]
)
def test_the_time_left_is_said_in_its_own_unit(seconds: float, said: str) -> None:
    assert _left(seconds) == said


CELLS = {
    "connect": """
import os, torch
from dataclasses import replace
from gradbox import GradClient, Gradient
client = GradClient(os.environ["TEST_URL"], os.environ["TEST_TOKEN"])
shards = [torch.ones(2, 3) for _ in range(8)]  # of 0.1 s: a shorter job may show no progress
slow = Gradient(model="slow", inputs=shards, loss=lambda z: z.square().sum(), name="<b>bold</b>")
""",
    "submit": "job = client.submit(slow)\njob",
    "await": "result = await job",
    "result": "result",
    "receipt": "result.manifest",
    "model": "client.model_info('slow')",
    "jobs": "client.job(job.id)",
    "all models": "client.models()",
    "all jobs": "client.jobs()",
    "refused": "# raises\nclient.run(replace(slow, inputs=[torch.ones(2, 9)]))",
    "traced": """# raises
def loss(z):
    return float(z.sum())
client.run(replace(slow, loss=loss))""",
    "plot": "result.plot();",
}


def run_notebook(box: TestBox, monkeypatch: pytest.MonkeyPatch, *cells: str) -> list[list[Any]]:
    """Run cells in a real kernel and return the outputs of each; some begin with "# raises"."""
    monkeypatch.setenv("TEST_URL", box.url)
    monkeypatch.setenv("TEST_TOKEN", box.token)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    for cell in notebook.cells:
        cell.metadata["tags"] = ["raises-exception"] if cell.source.startswith("# raises") else []
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    NotebookClient(notebook, timeout=500).execute()
    return [cell.outputs for cell in notebook.cells]


def data(outputs: list[Any], kind: str) -> list[str]:
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


def test_a_notebook_shows_widgets_tables_and_pictures(
    real: TestBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = dict(zip(CELLS, run_notebook(real, monkeypatch, *CELLS.values()), strict=True))
    assert data(shown["await"], "application/vnd.jupyter.widget-view+json")
    (job,) = data(shown["submit"], "text/html")
    assert "&lt;b&gt;bold" in job
    assert "<b>" not in job
    (done,) = data(shown["jobs"], "text/html")
    assert ": done" in done
    assert 'value="8" max="8"' in done
    for cell, said in (
        ("result", "layer.weight"),
        ("receipt", "torch"),
        ("model", "2 × 3"),
        ("all models", "mlp"),
        ("all jobs", "done"),
    ):
        (found,) = data(shown[cell], "text/html")
        assert said in found
        assert "#" not in found  # no colour that a dark page would not have
    assert data(shown["plot"], "image/png")
    for cell, said, own in (
        ("refused", "hint: this layer takes 3 features", ["client.run(replace("]),
        ("traced", "a Python number is needed here", ["client.run(replace(", "return float("]),
    ):
        (error,) = shown[cell]
        assert said in error.evalue
        assert f"{error.ename}: {error.evalue.splitlines()[0]}" in "".join(error.traceback)
        lines = [line.strip() for line in error.traceback]
        places = [place for place, line in enumerate(lines) if line.startswith('File "')]
        assert all(lines[at + 1].startswith(o) for at, o in zip(places, own, strict=True))
        assert all("ipykernel" in lines[place] for place in places)
        assert len(lines) <= 12


@pytest.mark.slow  # its text is that of a terminal
def test_a_notebook_without_widgets_shows_text(
    real: TestBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = "import sys; sys.modules['ipywidgets'] = None"
    cells = (without, CELLS["connect"], "client.submit(slow).result()")
    *_, outputs = run_notebook(real, monkeypatch, *cells)
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "<b>bold</b>: " in text
    assert "Warning" not in text
    assert not data(outputs, "application/vnd.jupyter.widget-view+json")


def test_a_process_without_a_kernel_loads_no_widgets() -> None:
    code = (
        "import sys; from gradbox.progress import ProgressBar\n"
        "with ProgressBar('job', shown=True) as bar: bar.show_upload(1, 2)\n"
        "print('ipywidgets' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
