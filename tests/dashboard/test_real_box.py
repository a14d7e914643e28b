"""On a real box, in a real browser: log in, watch a job move, cancel it, read why one failed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from playwright.sync_api import expect
from torch.nn import functional as F

from gradbox import Builtin, Gradient, Optimizer, TrainStep
from gradbox.cli import main
from tests.boxes import ROOT, TestBox, new_token
from tests.dashboard.conftest import PHONE, Open

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
    expect(page.locator(".devices .legend .model").last).to_have_text("slow 32\u202fB")
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
    rounded = f"{job.result().loss:.6g}"
    visit = open_page(box.url)
    visit.log_in(box.other_token)
    visit.page.goto(f"{box.url}/#/jobs/{job.id}")
    dialog = visit.page.get_by_role("dialog")
    expect(dialog).to_contain_text(re.compile(f"Loss{re.escape(rounded)}Shards"))
    expect(dialog).to_contain_text("Replay difference0, bit for bit")
    with visit.page.expect_download() as download:
        dialog.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename == f"{job.id}.safetensors"


def test_a_job_is_copied_as_code_that_runs_it_again(open_page: Open, box: TestBox) -> None:
    with box.client(box.other_token) as client:
        job = client.submit(slow_job("copied", num_shards=2))
        job.wait()
        visit = open_page(box.url)
        visit.log_in(box.other_token)
        visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        visit.page.goto(f"{box.url}/#/jobs/{job.id}")
        dialog = visit.page.get_by_role("dialog")
        dialog.get_by_text("Run it again").click()
        code = dialog.get_by_label("Code")
        expect(code).to_contain_text("client.again(")
        dialog.get_by_role("button", name="TOML").click()
        expect(code).to_contain_text(f'again = "{job.id}"')
        dialog.get_by_role("button", name="Copy", exact=True).click()
        expect(dialog.get_by_role("button", name="Copied")).to_be_visible()
        copied = tomllib.loads(visit.page.evaluate("navigator.clipboard.readText()"))
        assert client.again(copied.pop("again"), **copied).result().loss == job.result().loss


def test_the_boxs_owner_sees_others_jobs_and_a_user_does_not(open_page: Open, box: TestBox) -> None:
    job = box.client(box.other_token).submit(slow_job("private plan"))
    owner = open_page(box.url).log_in(box.token)
    expect(owner.get_by_role("row").filter(has_text="private plan")).to_be_visible()
    with box.http() as http:
        answer = http.get("/v1/session")
    assert answer.json() == {"you": None}
    owner.get_by_role("link", name="Jobs").click()
    # An owner without jobs is shown everybody's unasked.
    expect(owner.get_by_label("Everybody's")).to_be_checked()
    expect(owner.get_by_role("row").filter(has_text="private plan")).to_be_visible()
    owner.get_by_label("Everybody's").uncheck()
    expect(owner.get_by_text("You have no jobs yet")).to_be_visible()
    job.cancel()


def test_the_boxs_owner_pauses_it_and_everybody_sees_why(open_page: Open, box: TestBox) -> None:
    client = box.client(box.other_token)
    runs = client.submit(slow_job("runs", num_shards=600))
    user = open_page(box.url, size=PHONE).log_in(box.other_token)
    expect(user.get_by_role("button", name="Pause…")).to_have_count(0)
    expect(user.locator(".devices .state")).to_have_text("busy")
    owner = open_page(box.url).log_in(box.token)
    owner.get_by_role("button", name="Pause…").click()
    owner.get_by_role("button", name="Leave it").click()
    expect(user.locator("#held")).to_be_hidden()
    owner.get_by_role("button", name="Pause…").click()
    owner.get_by_label("Reason").fill("new <b>driver</b>")
    owner.get_by_role("button", name="Pause", exact=True).click()
    expect(owner.get_by_role("dialog")).to_have_count(0)
    waits = client.submit(slow_job("waits"))
    said = re.compile(r"The box is paused by root since \w+ \d.*: new <b>driver</b>\. Jobs wait")
    expect(user.locator("#held")).to_have_text(said)
    expect(user.locator(".devices .holds")).to_have_text("gradient of grace on slow, then paused")
    row = user.get_by_role("row").filter(has_text="waits")
    expect(row.locator(".phase")).to_have_text(re.compile(r"since \d+\u202fs, the box is paused"))
    runs.cancel()
    expect(user.locator(".devices .state")).to_have_text("paused")
    expect(user.locator(".devices .holds")).to_have_text("gets no job")
    user.goto(f"{box.url}/#/jobs/{waits.id}")
    expect(user.locator(".doing")).to_contain_text("the box is paused")
    owner.get_by_role("button", name="Resume…").click()
    owner.get_by_role("button", name="Resume", exact=True).click()
    expect(user.locator("#held")).to_be_hidden()
    assert waits.wait().state == "done"
    expect(owner.get_by_role("button", name="Drain…")).to_be_visible()


def test_a_runs_steps_show_up_as_they_are_made(open_page: Open, box: TestBox) -> None:
    page = open_page(box.url).log_in(box.other_token, "runs")
    expect(page.get_by_text("You have no runs yet")).to_be_visible()
    with box.client(box.other_token) as client:
        run = client.train("digits", optimizer=Optimizer("adam", lr=0.01), name="watched run")

        def step() -> TrainStep:
            shards = [torch.ones(4, 64, dtype=torch.float64)]
            labels = {"labels": torch.zeros(4, dtype=torch.int64)}
            return run.step(inputs=shards, loss=Builtin("cross_entropy"), loss_inputs=labels)

        row = page.get_by_role("row").filter(has_text="watched run")
        expect(row).to_contain_text("none yet")
        step()
        expect(row.locator(".steps")).to_have_text("1")
        row.get_by_role("link", name="watched run").click()
        reading = page.get_by_role("region", name="Loss").locator(".reading")
        expect(reading).to_have_text(re.compile(" at step 1$"))
        for _ in range(3):
            last = step()
        expect(reading).to_have_text(f"{last.loss:.4g} at step 4")
        expect(page.locator(".run-facts")).to_contain_text("Steps4")
        run.save("kept")
        expect(page.locator(".run-facts")).to_contain_text("kept (step 4)")
        owner = open_page(box.url).log_in(box.token, f"runs/{run.id}")
        expect(owner.locator(".curves path").first).to_be_visible()
        run.delete_save("kept")
        run.delete()


def test_a_model_shows_a_program_that_runs(
    open_page: Open, box: TestBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit = open_page(box.url, permissions=["clipboard-read", "clipboard-write"])
    page = visit.log_in(box.other_token, "models")
    model = page.get_by_role("listitem").filter(has_text="digits")
    model.get_by_text("A program to begin with").click()
    model.get_by_role("button", name="Copy").click()
    expect(model.get_by_role("button")).to_have_text("Copied")
    program = page.evaluate("navigator.clipboard.readText()")
    monkeypatch.setenv("GRADBOX_URL", box.url)
    monkeypatch.setenv("GRADBOX_TOKEN", box.other_token)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert re.fullmatch(r"loss \S+, gradients of 4 parameters\n", done.stdout)


def javascript(box: TestBox, url: str) -> str:
    """Return examples/gradient.mjs for this box, which leaves what it found behind."""
    program = (ROOT / "examples" / "gradient.mjs").read_text()
    assert program.count("http://127.0.0.1:8642") == program.count("gbx_…") == 1
    program = program.replace("http://127.0.0.1:8642", url).replace("gbx_…", box.other_token)
    return (
        f"{program}\nglobalThis.found = JSON.stringify({{ loss: receipt.loss, shape, "
        "gradient: [...gradient], images: [...images], labels: [...labels].map(Number) });\n"
    )


def assert_as_python_has_it(box: TestBox, text: str) -> None:
    found = json.loads(text)
    images = torch.tensor(found["images"], dtype=torch.float64).view(16, 64)
    gradient = Gradient(
        model="digits",
        inputs=list(images.split(8)),
        loss=lambda z, labels: F.cross_entropy(z, labels),
        loss_inputs={"labels": torch.tensor(found["labels"])},
    )
    expected = box.client(box.other_token).submit(gradient).result()
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-6)
    weight = expected.grads["0.weight"]
    assert found["shape"] == list(weight.shape)
    torch.testing.assert_close(
        torch.tensor(found["gradient"], dtype=torch.float64).view_as(weight), weight
    )


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on PATH")
def test_the_javascript_runs_in_node(box: TestBox, tmp_path: Path) -> None:
    program = tmp_path / "program.mjs"
    program.write_text(javascript(box, box.url) + "console.log(found);\n")
    done = subprocess.run(["node", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_as_python_has_it(box, done.stdout.splitlines()[-1])


def test_a_page_of_an_allowed_origin_calls_the_box_and_no_other_does(
    open_page: Open, box: TestBox, elsewhere: str
) -> None:
    visit = open_page(elsewhere)
    visit.page.goto(elsewhere)
    visit.page.add_script_tag(type="module", content=javascript(box, box.url))
    visit.page.wait_for_function("globalThis.found")
    assert_as_python_has_it(box, visit.page.evaluate("found"))
    other = open_page(elsewhere)
    other.page.goto(elsewhere.replace("127.0.0.1", "localhost"))
    call = "url => fetch(url).then(() => 'came', error => error.name)"
    assert other.page.evaluate(call, f"{box.url}/readyz") == "TypeError"
    assert "blocked by CORS policy" in other.wrong.pop(0)
    other.wrong.clear()  # the failed load, in the browser's other words


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
        http.put("/v1/operation", json={"mode": "running"})
        for job in http.get("/v1/jobs", params={"all": True}).json()["jobs"]:
            if job["state"] in ("queued", "running"):
                http.delete(f"/v1/jobs/{job['id']}")
