"""Strings that a terminal or a log would obey."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import pytest

from gradbox.cli import main
from proofs.attacks.attack import attack
from proofs.attacks.graphs import call
from proofs.attacks.target import NODE_Z, SUM, Target, graph_loss

# Clears the screen, sets the title, writes to the clipboard, turns the text around, forges a line.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\x9b31m\u202e\r\nERROR forged\x00"
HARMLESS = set("\n\t")


def _obeyed(text: str) -> str:
    """Return the characters of a text that a terminal obeys."""
    return "".join(c for c in text if not c.isprintable() and c not in HARMLESS)


@attack(
    "string: a job's name, in listings",
    tries="a job whose name has escape sequences, line ends and a zero byte",
    must="422, or `gradbox jobs list` and `show` print it escaped and on one line",
)
def _job_name(target: Target) -> None:
    for name in (HOSTILE, HOSTILE.replace("\x00", "")):
        answer = target.post(target.eve, name=name)
        if answer.status_code == 422:
            continue
        assert answer.status_code == 202, answer.text
        job = answer.json()["id"]
        target.ended(target.eve, job)
        for verb in (("list",), ("show", job)):
            said = _said_by("jobs", *verb, url=target.url, token=target.box.tokens["eve"])
            assert not _obeyed(said), repr(said)
            assert not any(line.startswith("ERROR forged") for line in said.splitlines())


@attack(
    "string: whatever reaches a log",
    tries="names of jobs, models, graphs, tensors, keys and messages of assertions with escapes",
    must="no log of the box has a control character or a forged line",
)
def _logs(target: Target) -> None:
    text = HOSTILE.replace("\x00", "")
    failed = [
        call("operator.gt", NODE_Z, 1e9, name="b"),
        call("torch.all", {"node": "b"}, name="all"),
        call("torch._assert", {"node": "all"}, text, name="a"),
        SUM,
    ]
    for changes in (
        {"name": text},
        {"model": text},
        {"loss": graph_loss({**SUM, "name": "s\x1b[2J"})},
        {"loss_inputs": {text: 1.0}},
        {"wrt": [text]},
        {"loss": graph_loss(*failed)},
    ):
        answer = target.post(target.eve, **changes)
        assert answer.status_code < 500, answer.text
        if answer.status_code == 202:
            target.ended(target.eve, answer.json()["id"])
    target.send(f"GET /{text} HTTP/1.1\r\nHost: {text}\r\n\r\n".encode())
    for path in (target.box.data / "logs").iterdir():
        logged = path.read_text(errors="surrogateescape")
        assert not _obeyed(logged), (path.name, repr(_obeyed(logged)))
        assert not any(line.startswith("ERROR forged") for line in logged.splitlines()), path.name


@attack(
    "string: what a box answers",
    tries="a hostile box: a problem, a job and a model with escapes, to the `gradbox` command",
    must="the command prints nothing that a terminal obeys, and no traceback",
)
def _hostile_box(target: Target) -> None:
    problem = {
        "type": "urn:gradbox:problem:invalid-inputs",
        "title": HOSTILE,
        "status": 422,
        "detail": HOSTILE,
        "category": "user",
        "request_id": HOSTILE,
    }
    view = {
        "id": "j" + HOSTILE,
        "state": "failed",
        "computation": HOSTILE,
        "model": HOSTILE,
        "name": HOSTILE,
        "owner": HOSTILE,
        "created_s": 0.0,
        "worker": HOSTILE,
        "error": problem,
    }
    for status, body, verb in (
        (422, problem, ("list",)),
        (200, {"jobs": [view]}, ("list",)),
        (200, view, ("show", "j")),
        (200, {"jobs": HOSTILE}, ("list",)),
    ):
        with _answering(status, body) as url:
            said = _said_by("jobs", *verb, url=url, token="gbx_x")
        assert not _obeyed(said), repr(said)
        assert "Traceback" not in said


def _said_by(*arguments: str, url: str, token: str) -> str:
    """Return what `gradbox` prints, here rather than in a process that imports it anew."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("GRADBOX_URL", url)
        patch.setenv("GRADBOX_TOKEN", token)
        said = StringIO()
        stack.enter_context(redirect_stdout(said))
        stack.enter_context(redirect_stderr(said))
        main([*arguments])
    return said.getvalue()


@contextmanager
def _answering(status: int, body: Any) -> Iterator[str]:
    """Run a box that gives one answer to whatever it is asked."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = json.dumps(body).encode()
            kind = "application/problem+json" if status >= 400 else "application/json"
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
