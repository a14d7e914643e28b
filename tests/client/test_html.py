"""What notebooks show of jobs, results, receipts and models: escaped, and no more than a screen."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

from gradbox import Gradient, OutOfMemory
from gradbox.html import card, listing, meter, size
from gradbox.protocol import (
    JobList,
    JobState,
    JobView,
    MethodView,
    ModelList,
    ModelView,
    ParameterView,
    ProgressView,
    Receipt,
    Seconds,
)
from tests.boxes import TestBox
from tests.client.wires import answer, client_of, job_view

HOSTILE = "<script>alert(1)</script>\"'&\x1b[2J\u202e"
ALLOWED = {"div", "strong", "table", "tr", "th", "td", "progress"}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        assert {name for name, _ in attrs} <= {"style", "scope", "value", "max", "aria-label"}

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert set(tags.opened) <= ALLOWED
    assert tags.opened.count("tr") <= 40
    assert not {"\x1b", "\u202e"} & set(html)
    return tags


def receipt() -> Receipt:
    return Receipt(
        protocol=1,
        job=HOSTILE,
        spec_digest="0",
        computation="gradient",
        model=HOSTILE,
        model_version="0" * 64,
        seed=0,
        mode="train",
        precision="fp32",
        device=HOSTILE,
        torch="2",
        gradbox="1",
        loss=1 / 3,
        shards={HOSTILE: 3},
        unreached=["x"] * 10_000,
        seconds=Seconds(forward=1.5),
        peak_memory_bytes=3 * 2**30,
        memory_before_bytes=0,
    )


def model() -> ModelView:
    return ModelView(
        name=HOSTILE,
        version="0" * 64,
        num_parameters=12345,
        parameters=[ParameterView(name=HOSTILE, shape=[2, 3], dtype="float32")] * 1000,
        methods={HOSTILE: MethodView(arguments=[HOSTILE], required=[])},
    )


def failed_job() -> JobView:
    return job_view(JobState.FAILED, error=OutOfMemory(HOSTILE * 100)).model_copy(
        update={"name": HOSTILE, "progress": ProgressView(phase=HOSTILE, done=1, total=4)}
    )


def models() -> ModelList:
    return ModelList(models=[model()] * 1000)


def jobs() -> JobList:
    return JobList(jobs=[failed_job()] * 100, next="2")


@pytest.mark.parametrize("make", [receipt, model, failed_job, models, jobs])
def test_whatever_comes_over_the_wire_is_escaped(make: object) -> None:
    tags = parsed(make()._repr_html_())  # type: ignore[operator]
    assert "<script>alert(1)</script>" in tags.text


def test_facts_say_what_a_person_asks_for() -> None:
    text = parsed(receipt()._repr_html_()).text
    assert "3 GiB" in text
    assert "secondsforward 1.5" in text
    assert "loss0.333333" in text
    assert "10,000" in text
    assert "num parameters12,345" in parsed(model()._repr_html_()).text
    assert "and 988 more parameters" in parsed(model()._repr_html_()).text


def test_models_and_jobs_are_tables_and_what_they_were(twin: TestBox) -> None:
    with twin.client() as client:
        client.run(Gradient(model="mlp", inputs=[torch.ones(2, 5).double()], loss=torch.sum))
        found = client.models()
        assert isinstance(found, list)
        assert "mlp" in parsed(found._repr_html_()).text  # type: ignore[attr-defined]
        latest = client.jobs(limit=1)
        (job,) = client.jobs(limit=1)
        assert f"{job.id}donegradientmlp" in parsed(latest._repr_html_()).text  # type: ignore[attr-defined]
        assert [j.id for j in latest] == [job.id]
        assert next(client.jobs(state="running"), None) is None
    assert "and 88 more jobs" in parsed(jobs()._repr_html_()).text


def test_a_job_shows_how_far_it_was_when_it_was_last_asked() -> None:
    running = job_view(JobState.RUNNING).model_copy(
        update={"progress": ProgressView(phase="replay", done=3, total=4, seconds_left=7.0)}
    )
    replies = [answer(running)]
    job = client_of(lambda request: replies.pop()).job("j1")
    html = job._repr_html_()
    assert 'value="3" max="4"' in html
    assert "replay 3 of 4" in parsed(html).text
    assert "seconds left 7" in html


def test_a_result_shows_its_tensors_without_reading_them(twin: TestBox) -> None:
    shards = [torch.ones(2, 5).double()]
    with twin.client() as client:
        job = client.submit(Gradient(model="mlp", inputs=shards, loss=lambda z: z.sum()))
        for result in (job.result(60), job.open()):
            text = parsed(result._repr_html_()).text
            assert "grads/0.weight" in text
            assert "F64" in text
            assert text.index("grads/0.weight") < text.index("grads/4.bias")


def test_parts_are_plain() -> None:
    assert card("t", [("a", None), ("b", ""), ("c", 0)]).count("<tr>") == 1
    assert listing(("a",), [], what="rows") == ""
    assert 'max="1"' in meter(0, 0, label="none")
    assert [size(n) for n in (5, 2048, 3 * 2**20)] == ["5 bytes", "2 KiB", "3 MiB"]
