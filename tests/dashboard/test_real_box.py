"""On a real box, in a real browser: log in, watch a job move, cancel it, read why one failed."""

from __future__ import annotations

import re

import pytest
import torch
from playwright.sync_api import expect

from gradbox import Builtin, Gradient
from gradbox.cli import main
from tests.boxes import TestBox, new_token
from tests.dashboard.conftest import Open

NUM_SHARDS = 60


def slow_job(name: str, *, num_shards: int = NUM_SHARDS, columns: int = 3) -> Gradient:
    """Return a job of 0.1 s a shard; one whose shards have other than 3 columns fails."""
    shards = [torch.ones(1, columns) for _ in range(num_shards)]
    labels = torch.zeros(num_shards, dtype=torch.int64)
    loss = Builtin("cross_entropy")
    return Gradient(
        model="slow", inputs=shards, loss=loss, loss_inputs={"labels": labels}, retain=0, name=name
    )


def test_a_wrong_token_is_answered_with_what_to_do(open_page: Open, box: TestBox) -> None:
    visit = open_page(box.url)
    visit.page.goto(box.url)
    visit.page.get_by_label("Token").fill("gbx_nobodys")
    visit.page.get_by_label("Token").press("Enter")
    alert = visit.page.get_by_role("alert")
    expect(alert).to_contain_text("A valid token is needed")
    expect(alert).to_contain_text("gradbox tokens create NAME")
    expect(visit.page.get_by_label("Token")).to_be_focused()


def test_a_job_moves_before_ones_eyes_and_is_cancelled(open_page: Open, box: TestBox) -> None:
    page = open_page(box.url).log_in(box.other_token)
    expect(page.get_by_text("Nothing runs and nobody waits")).to_be_visible()
    job = box.client(box.other_token).submit(slow_job("watched"))
    row = page.get_by_role("row").filter(has_text="watched")
    expect(row.locator(".phase")).to_have_text(re.compile(r"forward \d+ / 60 shards"))
    first = row.locator(".phase").text_content()
    expect(row.locator(".phase")).not_to_have_text(str(first))
    expect(page.locator(".devices .state")).to_have_text("busy")
    expect(page.locator(".devices .legend .model")).to_have_text("slow 32\u202fB")
    expect(page.locator(".devices .holds")).to_have_text("gradient of grace on slow")
    cancel = row.get_by_role("button", name="Cancel watched")
    cancel.click()
    row.get_by_role("button", name="Really cancel watched").click()
    expect(row).to_have_count(0)
    assert job.wait().state == "cancelled"
    page.get_by_role("link", name="Jobs").click()
    listed = page.get_by_role("row").filter(has_text="watched").first
    expect(listed.locator(".state")).to_have_text("cancelled")


def test_a_failed_job_says_why(open_page: Open, box: TestBox) -> None:
    page = open_page(box.url).log_in(box.other_token, "jobs")
    job = box.client(box.other_token).submit(slow_job("wrong width", num_shards=2, columns=5))
    row = page.get_by_role("row").filter(has_text="wrong width")
    expect(row.locator(".state")).to_have_text("failed")
    row.get_by_role("link", name="wrong width").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Why it failed")
    expect(dialog).to_contain_text("The model or the loss raised an error")
    expect(dialog).to_contain_text(job.id)
    page.keyboard.press("Escape")
    expect(dialog).not_to_be_visible()
    expect(page).to_have_url(re.compile("#/jobs$"))


def test_a_job_that_is_done_shows_its_receipt(open_page: Open, box: TestBox) -> None:
    job = box.client(box.other_token).submit(slow_job("short", num_shards=2))
    loss = job.result().loss
    visit = open_page(box.url)
    visit.log_in(box.other_token)
    visit.page.goto(f"{box.url}/#/jobs/{job.id}")
    dialog = visit.page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Loss{loss}")
    expect(dialog).to_contain_text("Replay difference0, bit for bit")
    with visit.page.expect_download() as download:
        dialog.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename == f"{job.id}.safetensors"


def test_the_boxs_owner_sees_others_jobs_and_a_user_does_not(open_page: Open, box: TestBox) -> None:
    job = box.client(box.other_token).submit(slow_job("private plan"))
    owner = open_page(box.url).log_in(box.token)
    expect(owner.get_by_role("row").filter(has_text="private plan")).to_be_visible()
    with box.http() as http:
        answer = http.get("/v1/session")
    assert answer.json() == {"you": None}
    owner.get_by_role("link", name="Jobs").click()
    expect(owner.get_by_role("row").filter(has_text="private plan")).to_have_count(0)
    owner.get_by_label("Everybody's").check()
    expect(owner.get_by_role("row").filter(has_text="private plan")).to_be_visible()
    job.cancel()


def test_a_revoked_token_ends_the_session(open_page: Open, box: TestBox) -> None:
    assert box.data is not None
    page = open_page(box.url).log_in(new_token(box.data, "shortly"))
    assert main(["tokens", "revoke", "shortly", "--data", str(box.data)]) == 0
    expect(page.get_by_label("Token")).to_be_visible()
    expect(page.get_by_text("Your session is over")).to_be_visible()


@pytest.fixture(autouse=True)
def _nothing_left_running(box: TestBox) -> None:
    """Cancel what an earlier test that failed left behind."""
    with box.http() as http:
        for job in http.get("/v1/jobs", params={"all": True}).json()["jobs"]:
            if job["state"] in ("queued", "running"):
                http.delete(f"/v1/jobs/{job['id']}")
