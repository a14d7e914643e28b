"""Faults of the network and of what stands in it, answered by hand."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
import torch

from gradbox import (
    GradboxError,
    GradClient,
    Gradient,
    InvalidInputs,
    JobFailed,
    JobNotFound,
    JobState,
    MissingBlobs,
    OutOfMemory,
    ProtocolError,
    ResultNotReady,
    ServiceUnavailable,
    StorageFull,
    Unauthorized,
)
from gradbox.http.connection import Connection
from gradbox.http.download import HashedFile, download, part_of
from gradbox.progress import ProgressBar
from gradbox.protocol import ProgressView, ResultView
from gradbox.settings import ClientSettings
from tests.client.wires import QUICK, Broken, answer, client_of, job_view, problem

GRADIENT = Gradient(model="m", inputs=[torch.ones(2)], loss=lambda z: z.sum())


FAULTS: dict[str, list[httpx.Response | Exception]] = {
    "busy": [httpx.Response(503), problem(ServiceUnavailable("busy")), httpx.Response(429)],
    "a broken connection": [httpx.RemoteProtocolError("server disconnected")] * 2,
    "restarts": [httpx.ConnectError("connection refused")] * 2,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_box_with_a_fault_that_passes_is_asked_again_until_it_answers(fault: str) -> None:
    replies = [answer(job_view()), *FAULTS[fault], answer(job_view())]

    def handler(request: httpx.Request) -> httpx.Response:
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    client = client_of(handler)
    assert [client.job("j1").id for _ in range(2)] == ["j1", "j1"]
    assert not replies


def test_only_a_long_wait_is_told_and_once(caplog: pytest.LogCaptureFixture) -> None:
    full = problem(StorageFull("the disk is full"), headers={"Retry-After": "1"})
    replies = [full, httpx.Response(503), answer(job_view())]
    patient = type(QUICK)(patience_s=5, first_pause_s=0.001)
    client_of(lambda request: replies.pop(0), retry=patient).job("j1")
    (told,) = caplog.messages
    assert told == "the disk is full; trying again for up to 5 s"
    caplog.clear()
    replies = [httpx.Response(503), answer(job_view())]
    client_of(lambda request: replies.pop(0), retry=patient).job("j1")
    assert not caplog.messages


def test_retry_after_is_waited_for() -> None:
    times: list[float] = []

    def handler(request: httpx.Request) -> httpx.Response:
        times.append(time.monotonic())
        if len(times) == 1:
            return problem(ServiceUnavailable("busy"), headers={"Retry-After": "1"})
        return answer(job_view())

    patient = type(QUICK)(patience_s=5, first_pause_s=0.001)
    client_of(handler, retry=patient).job("j1")
    assert times[1] - times[0] >= 1.0


def test_patience_ends_with_what_the_box_said_last() -> None:
    with pytest.raises(ServiceUnavailable, match="redis is away"):
        client_of(lambda request: problem(ServiceUnavailable("redis is away"))).jobs()


def test_a_refused_connection_says_where_and_what_to_do_at_once() -> None:
    with socket.socket() as deaf:  # holds the port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ServiceUnavailable, match=f"{url}.*gradbox up") as caught:
            GradClient(url, "token").jobs()
    assert time.monotonic() - began < 20
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


@pytest.mark.parametrize(
    "error",
    [Unauthorized("who?"), JobNotFound("none"), InvalidInputs("shard 3"), GradboxError("x")],
)
def test_a_problem_is_raised_as_its_class_with_its_words(error: GradboxError) -> None:
    with pytest.raises(type(error), match=str(error)) as caught:
        client_of(lambda request: problem(error)).job("j1")
    assert "r1" in caught.value.__notes__[0]


@pytest.mark.parametrize("category", ["user", "server"])
def test_a_problem_without_a_class_keeps_its_category(category: str) -> None:
    found = {"type": "urn:gradbox:problem:invalid-request", "title": "t", "status": 422}
    reply = httpx.Response(
        422,
        json={**found, "detail": "limit", "category": category},
        headers={"Content-Type": "application/problem+json"},
    )
    with pytest.raises(GradboxError, match="limit") as caught:
        client_of(lambda request: reply).jobs(limit=0)
    assert caught.value.category == category


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(404, html="<h1>nginx</h1>"),
        httpx.Response(500, content=b"oops"),
        httpx.Response(302, headers={"Location": "http://login"}),
        httpx.Response(422, content=b"{}", headers={"Content-Type": "application/problem+json"}),
        httpx.Response(200, html="<h1>welcome</h1>"),
    ],
    ids=["404", "500", "redirect", "no problem", "200"],
)
def test_what_is_no_box_is_told_apart_from_one(reply: httpx.Response) -> None:
    with pytest.raises(ProtocolError, match="http://box/v1/jobs/j1"):
        client_of(lambda request: reply).job("j1")


LOGIN = "<!DOCTYPE html><title>Sign in</title>"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (httpx.Response(413, html="<h1>413</h1>"), r"no body of \d+ bytes: .*client_max_body_size"),
        (httpx.Response(302, headers={"Location": "http://login"}), "at http://login, .* log in"),
        (httpx.Response(200, html=LOGIN), "to log in: have it let /v1 through"),
        (httpx.Response(401, html=LOGIN), "to log in: have it let /v1 through"),
        (httpx.Response(404, html="<h1>nginx</h1>"), r"something before it\?$"),
        (httpx.Response(200, json={"id": 3}), "older or newer"),
    ],
    ids=["413", "redirect", "login page", "login page of status 401", "404", "another version"],
)
def test_what_stands_before_a_box_is_told_of(reply: httpx.Response, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        client_of(lambda request: reply).run(GRADIENT)


@pytest.mark.parametrize("awaits", [False, True])
def test_a_box_that_dies_while_one_waits_leaves_the_way_back_to_the_job(awaits: bool) -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if len(asked) > 1:
            raise httpx.ConnectError("connection refused")
        return answer(job_view(JobState.RUNNING))

    job = client_of(handler).job("j1")
    back = r"job j1 stays on the box: .*\.job\('j1'\)\.result\(\), or `gradbox jobs watch j1`"
    with pytest.raises(ServiceUnavailable, match=f"connection refused.*{back}"):
        asyncio.run(job.wait_async()) if awaits else job.result()


class Posts:
    """A box that takes everything, and answers posts as it is told."""

    def __init__(self, *replies: httpx.Response) -> None:
        self.replies = list(replies)
        self.keys: list[str] = []
        self.puts: list[str] = []
        self.forms: list[bool] = []  # whether blobs came with each post

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "HEAD":
            return httpx.Response(404)
        if request.method == "PUT":
            digest = hashlib.sha256(request.content).hexdigest()
            assert request.url.path.endswith(digest)
            assert request.headers["Content-Length"] == str(len(request.content))
            self.puts.append(digest)
            return httpx.Response(201)
        self.keys.append(request.headers["Idempotency-Key"])
        self.forms.append(request.headers["Content-Type"].startswith("multipart/form-data"))
        return self.replies.pop(0)


def test_a_repeated_post_carries_the_same_key_and_the_next_job_another() -> None:
    box = Posts(httpx.Response(503), answer(job_view()), answer(job_view()))
    client = client_of(box)
    client.submit(GRADIENT)
    client.submit(GRADIENT)
    assert box.keys[0] == box.keys[1] != box.keys[2]


def test_a_blob_seen_on_the_box_is_not_sent_again() -> None:
    box = Posts(answer(job_view()), answer(job_view()))
    client = client_of(box)
    client.submit(GRADIENT)
    client.submit(GRADIENT)
    assert (box.forms, box.puts) == ([True, False], [])


def test_blobs_that_the_box_has_lost_are_uploaded_again() -> None:
    box = Posts(answer(job_view()), problem(MissingBlobs("gone")), answer(job_view()))
    client = client_of(box)
    client.submit(GRADIENT)
    client.submit(GRADIENT)
    assert (box.forms, len(box.puts)) == ([True, False, False], 1)
    assert box.keys[1] == box.keys[2]


def state_event(number: int, state: JobState) -> bytes:
    return f"event: state\nid: {number}-0\ndata: {job_view(state).model_dump_json()}\n\n".encode()


def progress_event(number: int, done: int) -> bytes:
    data = json.dumps({"phase": "forward", "done": done, "total": 9})
    return f"event: progress\r\nid: {number}-0\r\ndata: {data}\r\n\r\n".encode()


def test_events_go_on_behind_the_last_one_after_a_break() -> None:
    resumed: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return answer(job_view())
        resumed.append(request.headers.get("Last-Event-ID"))
        if len(resumed) == 1:
            whole = state_event(1, JobState.RUNNING) + progress_event(2, 3)
            # Cut within an event and within a character, as networks do.
            return httpx.Response(200, stream=Broken(whole[:30], whole[30:], b"event: pro"))
        if len(resumed) == 2:
            return httpx.Response(200, content=b": keep-alive\n\n" + progress_event(3, 7))
        return httpx.Response(
            200, content=b"event: news\ndata: {}\n\n" + state_event(4, JobState.DONE)
        )

    events = list(client_of(handler).job("j1").events())
    assert [event.id for event in events] == ["1-0", "2-0", "3-0", "4-0"]
    assert resumed == [None, "2-0", "3-0"]


def test_nothing_comes_behind_the_final_event() -> None:
    asked: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return answer(job_view(JobState.DONE if asked else JobState.RUNNING))
        assert request.headers["Accept-Encoding"] == "identity"  # else proxies hold events back
        asked.append(request.headers.get("Last-Event-ID"))
        return httpx.Response(200, content=b"")

    job = client_of(handler).job("j1")
    assert list(job.events(after="9-0")) == []
    assert asked == ["9-0", "9-0"]
    assert job.view.state is JobState.DONE


def test_a_final_event_behind_a_silent_stream_is_given() -> None:
    streams = [b": keep-alive\n\n", b": keep-alive\n\n", state_event(4, JobState.DONE)]
    states = [JobState.RUNNING, JobState.RUNNING, JobState.DONE]

    def handler(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return answer(job_view(states.pop(0)))
        return httpx.Response(200, content=streams.pop(0))

    events = list(client_of(handler).job("j1").events())
    assert [event.id for event in events] == ["4-0"]


def test_an_event_of_another_form_is_a_protocol_error() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return answer(job_view())
        return httpx.Response(200, content=b'event: state\ndata: {"state": 3}\n\n')

    with pytest.raises(ProtocolError, match="older or newer"):
        list(client_of(handler).job("j1").events())


def test_the_reason_of_a_failure_is_raised_as_its_class() -> None:
    failed = job_view(JobState.FAILED, error=OutOfMemory("make the shards smaller"))
    with pytest.raises(OutOfMemory, match="smaller") as caught:
        client_of(lambda request: answer(failed)).job("j1").result()
    assert isinstance(caught.value, JobFailed)


def test_a_result_that_is_not_there_yet_is_not_fetched(tmp_path: Path) -> None:
    job = client_of(lambda request: answer(job_view(JobState.RUNNING))).job("j1")
    with pytest.raises(ResultNotReady, match="running"):
        job.fetch(tmp_path / "result")


CONTENT = bytes(range(256)) * 40


class Results:
    """A box with one result, whose connection breaks after `most` bytes."""

    def __init__(self, *, most: int = len(CONTENT), sha256: str | None = None) -> None:
        self.most = most
        self.ranges: list[str | None] = []
        found = sha256 or hashlib.sha256(CONTENT).hexdigest()
        self.view = job_view(
            JobState.DONE, result=ResultView(size_bytes=len(CONTENT), sha256=found)
        )

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/result"):
            return answer(self.view)
        wanted = request.headers.get("Range")
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        assert not wanted or request.headers["If-Range"] == f'"{self.view.result.sha256}"'
        status = 206 if wanted else 200
        headers = {"Content-Range": f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"}
        piece = CONTENT[start : start + self.most]
        if start + len(piece) < len(CONTENT):
            return httpx.Response(status, headers=headers, stream=Broken(piece))
        return httpx.Response(status, headers=headers, content=piece)


OTHER = ResultView(size_bytes=len(CONTENT), sha256="0" * 64)
PARTS: dict[str, tuple[int, dict[ResultView | None, bytes], list[str | None]]] = {
    "a broken download": (4000, {}, [None, "bytes=4000-", "bytes=8000-"]),
    "one of an earlier process": (len(CONTENT), {None: CONTENT[:100]}, ["bytes=100-"]),
    "a part of another result": (len(CONTENT), {OTHER: b"x" * 100}, [None]),
    "a part that is too long": (len(CONTENT), {None: b"x" * (len(CONTENT) + 1)}, [None]),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_download_goes_on_with_the_part_that_is_there_of_it(name: str, tmp_path: Path) -> None:
    most, left, ranges = PARTS[name]
    box, path = Results(most=most), tmp_path / "result"
    for result, part in left.items():
        part_of(path, result or box.view.result).write_bytes(part)
    client_of(box).job("j1").fetch(path)
    assert path.read_bytes() == CONTENT
    assert box.ranges == ranges
    others = {part_of(path, result).name for result in left if result}
    assert {found.name for found in tmp_path.iterdir()} == {"result", *others}


LONG = os.urandom(20 * 2**20)


class LongResult(BaseHTTPRequestHandler):
    """A result over a socket, of which three MiB come and then what `fault` says."""

    protocol_version = "HTTP/1.1"
    fault: ClassVar[str]
    ranges: ClassVar[list[str | None]]

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(LONG) - start))
        self.send_header("Content-Range", f"bytes {start}-{len(LONG) - 1}/{len(LONG)}")
        self.end_headers()
        if wanted or not self.fault:
            self.wfile.write(LONG[start:])
            return
        self.wfile.write(LONG[: 3 * 2**20])
        self.close_connection = True
        if self.fault == "stalls":
            self.connection.recv(1)  # until the client has closed
        if self.fault == "resets":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()


@pytest.mark.parametrize("fault", ["", "closes", "resets", "stalls"])
def test_a_long_download_over_a_socket_goes_on_where_it_broke(fault: str, tmp_path: Path) -> None:
    LongResult.fault, LongResult.ranges = fault, []
    expected = ResultView(size_bytes=len(LONG), sha256=hashlib.sha256(LONG).hexdigest())
    path = tmp_path / "result"
    with ThreadingHTTPServer(("127.0.0.1", 0), LongResult) as server:
        threading.Thread(target=server.serve_forever).start()
        settings = ClientSettings(url=f"http://127.0.0.1:{server.server_port}", token="token")
        connection = Connection(settings, timeout_s=1.0, retry=QUICK)
        try:
            for _ in range(2):  # the second time on another connection
                download(connection, "/result", path, expected=expected)
                assert path.read_bytes() == LONG
        finally:
            connection.close()
            server.shutdown()
    started = [wanted is None for wanted in LongResult.ranges]
    assert started == ([True, False] * 2 if fault else [True] * 2)
    if fault == "closes":
        assert LongResult.ranges[1] == f"bytes={3 * 2**20}-"


def test_a_new_file_is_not_truncated(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with path.open("w+b") as file, HashedFile(file) as hashed:
        os.utime(path, (0, 0))
        hashed.empty()
        assert path.stat().st_mtime == 0


def test_bytes_that_are_not_the_announced_ones_are_thrown_away(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="SHA-256"):
        client_of(Results(sha256="0" * 64)).job("j1").fetch(tmp_path / "result")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_the_job_running_and_says_how_to_get_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    methods: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        methods.append(request.method)
        if "prefer" in request.headers:
            raise KeyboardInterrupt
        return answer(job_view())

    with pytest.raises(KeyboardInterrupt):
        client_of(handler).job("j1").wait()
    assert "gradbox jobs watch j1" in capsys.readouterr().err
    assert "DELETE" not in methods


def test_ctrl_c_while_a_job_is_posted_says_where_to_look(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(request: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt

    job = Gradient(model="m", inputs=[torch.ones(2, 2)], loss=lambda z: z.sum())
    with client_of(interrupted) as client, pytest.raises(KeyboardInterrupt):
        client.run(job)
    assert "GradClient().jobs(limit=1)" in capsys.readouterr().err


def test_a_progress_bar_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressView(phase="forward", done=1, total=4)
    runs = job_view(JobState.RUNNING).model_copy(update={"progress": progress, "attempts": 1})
    done = job_view(JobState.DONE).model_copy(update={"attempts": 1})

    def waited_for(progress: bool | None) -> None:
        views = [job_view(), runs, done]
        client_of(lambda request: answer(views.pop(0))).job("j1").wait(progress=progress)

    waited_for(None)
    assert capsys.readouterr().err == ""
    waited_for(True)
    assert "forward" in capsys.readouterr().err


def test_a_bar_is_not_drawn_more_often_than_it_can_be_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ProgressBar("job", shown=True) as bar:
        for have in range(1000):
            bar.show_download(have * 2**20, 1000 * 2**20)
    assert capsys.readouterr().err.count("fetching") < 100
