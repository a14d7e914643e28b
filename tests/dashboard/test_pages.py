"""Every page on a busy day: for eyes, keyboards, screen readers and phones; within its policy."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from gradbox.protocol import DeviceMemory, ModelBuild, OperationMode, OperationView
from gradbox_service.dashboard.pages import POLICY
from gradbox_service.fleet import WorkerPresence
from tests.dashboard.conftest import DESK, PHONE, Open
from tests.dashboard.staged import GIB, LEASE_S, Staged, ended, many_waiting, staged

TOWERS = f"runs/{240:032x}"
STORE = f"stores/{sum(map(ord, 'wiki-train')):032x}"
# What has to be there before a page counts as shown.
VIEWS = {
    "": ".queue tbody tr",
    "jobs": ".jobs tbody tr",
    "jobs/late-0": "dialog .legend",
    "jobs/late-1": "dialog .problem",
    "runs": ".runs-list tbody tr",
    TOWERS: ".curves path",
    "stores": ".stores-list tbody tr",
    STORE: ".grants li",
    "use": ".people tbody tr",
    "models": ".models li",
}
# Rows like those before them, which take axe-core seconds.
REPEATED = ["tbody tr:nth-child(n+4)", ".calls section:nth-child(n+4)", "details:nth-of-type(n+2)"]
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def show(page: Page, url: str, view: str) -> None:
    page.goto(f"{url}/#/{view}")
    page.locator(VIEWS[view]).first.wait_for()


def violations(page: Page) -> list[Any]:
    """Return what axe-core has against the page: contrast, names, roles, order, landmarks."""
    options = {"runOnly": {"type": "tag", "values": RULES}}
    found = Axe().run(page, context={"exclude": REPEATED}, options=options)
    return [
        (item["id"], node["target"], node.get("failureSummary"))
        for item in found.response["violations"]
        for node in item["nodes"]
    ]


@pytest.mark.parametrize(
    ("theme", "size"),
    [
        pytest.param("light", DESK, marks=pytest.mark.slow, id="light-desk"),
        pytest.param("dark", PHONE, id="dark-phone"),
    ],
)
def test_pages_are_accessible_and_fit(
    open_page: Open, busy: Staged, theme: str, size: tuple[int, int]
) -> None:
    # axe itself works in ways that the pages' policy forbids.
    visit = open_page(busy.url, size=size, color_scheme=theme, bypass_csp=True)
    visit.page.goto(busy.url)
    visit.page.get_by_label("Token").wait_for()
    found = {"log in": violations(visit.page)}
    visit.log_in(busy.token)
    for view in VIEWS:
        show(visit.page, busy.url, view)
        found[view] = violations(visit.page)
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= size[0], view
    visit.page.goto(f"{busy.url}/docs")
    visit.page.locator(".calls .verb").first.wait_for()
    found["docs"] = violations(visit.page)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert {view: items for view, items in found.items() if items} == {}


@pytest.mark.parametrize(
    ("theme", "size"),
    [
        pytest.param("light", PHONE, id="light-phone"),
        pytest.param("dark", DESK, marks=pytest.mark.slow, id="dark-desk"),
    ],
)
def test_an_owners_parts_are_accessible_and_fit(
    open_page: Open, busy: Staged, theme: str, size: tuple[int, int]
) -> None:
    visit = open_page(busy.url, size=size, color_scheme=theme, bypass_csp=True)
    page = visit.log_in(busy.owner_token, "models")
    page.get_by_text("A program to begin with").first.click()
    found = {"program": violations(page)}
    paused = OperationView(mode=OperationMode.PAUSED, by="owner", reason="new driver")
    busy.backing.operation.set(paused)
    try:
        show(page, busy.url, "")
        page.reload()
        page.locator("#held").wait_for()
        found["paused"] = violations(page)
        page.get_by_role("button", name="Drain…").click()
        found["asked"] = violations(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    finally:
        busy.backing.operation.set(OperationView())
        busy.backing.records.wake()
    assert {part: items for part, items in found.items() if items} == {}


def test_pages_load_nothing_from_elsewhere(open_page: Open, busy: Staged) -> None:
    visit = open_page(busy.url)
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    page = visit.log_in(busy.token)
    for view in VIEWS:
        show(page, busy.url, view)
    page.goto(f"{busy.url}/docs")
    page.locator(".calls .verb").first.wait_for()
    assert asked
    assert [url for url in asked if not url.startswith(busy.url + "/")] == []


@pytest.mark.parametrize("path", ["/", "/docs", "/static/main.js"])
def test_the_policy_admits_only_the_boxs_own_files(busy: Staged, path: str) -> None:
    answer = httpx.get(busy.url + path)
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY
    again = httpx.get(busy.url + path, headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
    assert httpx.get(f"{busy.url}/static/none.js").status_code == 404
    assert httpx.get(f"{busy.url}/static/..%2Fpages.py").status_code == 404


def test_the_browser_refuses_to_parse_text_as_html(open_page: Open, busy: Staged) -> None:
    visit = open_page(busy.url)
    page = visit.log_in(busy.token)
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true } }"
    )
    assert refused is True
    assert "TrustedHTML" in visit.wrong.pop()
    assert visit.wrong == []


def test_everything_is_reached_by_keyboard(open_page: Open, busy: Staged) -> None:
    page = open_page(busy.url).log_in(busy.token)
    show(page, busy.url, "")
    page.reload()
    page.locator(VIEWS[""]).first.wait_for()
    reached: list[str] = []
    outlined: list[bool] = []
    for _ in range(13):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "() => [document.activeElement.textContent.trim(),"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.append(name)
        outlined.append(outline != "none")
    assert reached[:11] == [
        "Skip to content", "gradbox", "Overview", "Jobs", "Runs", "Stores", "Use", "Models", "API",
        "Log out",
        "two towers, seed 3",
    ]  # fmt: skip
    assert reached[11] == "Cancel"
    assert all(outlined)
    page.get_by_role("link", name="Use").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Use", level=1)).to_be_focused()
    page.locator(".columns svg").first.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".reading").first).to_contain_text(":")
    page.set_viewport_size({"width": 900, "height": 800})  # draws pictures anew, but for this one
    page.wait_for_timeout(300)
    expect(page.locator(".reading").first).to_contain_text(":")
    expect(page.locator(".columns svg").first).to_be_focused()


def test_cancel_is_shown_where_the_pointer_or_the_focus_is(open_page: Open, busy: Staged) -> None:
    page = open_page(busy.url).log_in(busy.token)
    row = page.get_by_role("row").filter(has_text="two towers, seed 3").first
    cancel = row.get_by_role("button")
    expect(cancel).to_have_css("opacity", "0")
    row.hover()
    expect(cancel).to_have_css("opacity", "1")
    page.mouse.move(0, 0)
    expect(cancel).to_have_css("opacity", "0")
    row.get_by_role("link").focus()
    page.keyboard.press("Tab")
    expect(cancel).to_be_focused()
    expect(cancel).to_have_css("opacity", "1")
    touch = open_page(busy.url, size=PHONE, has_touch=True, is_mobile=True).log_in(busy.token)
    expect(touch.locator(".queue .act button").first).to_have_css("opacity", "1")


def test_the_memory_of_a_host_counts_once(open_page: Open, tmp_path: Path) -> None:
    with staged(tmp_path) as box:
        page = open_page(box.url).log_in(box.token)
        for host, device in (("a", "cpu"), ("a", "cpu"), ("b", "cpu"), ("b", "cuda:0")):
            number = len(box.backing.fleet.workers())
            memory = DeviceMemory(total_bytes=32 * GIB, used_bytes=GIB)
            worker = WorkerPresence(
                name=f"worker-{number}", host=host, device=device, state="idle", memory=memory
            )
            box.backing.fleet.announce(worker, ttl_s=LEASE_S)
        box.backing.records.wake()
        expect(page.locator(".figures div").last).to_contain_text("4\u202fGiB of 96\u202fGiB")


def test_a_log_out_ends_it(open_page: Open, busy: Staged) -> None:
    visit = open_page(busy.url)
    page = visit.log_in(busy.token)
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("Token").wait_for()
    assert page.context.cookies() == []
    page.reload()
    page.get_by_label("Token").wait_for()


def test_what_waits_says_since_when_and_when_it_begins(open_page: Open, busy: Staged) -> None:
    page = open_page(busy.url).log_in(busy.token)
    phase = page.locator(".queue .waits .phase")
    expect(phase.first).to_have_text(
        re.compile(r"^since \d+\u202f\S+, begins in about \d+\u202f\S+$")
    )


def test_a_model_that_is_being_built_is_named(open_page: Open, tmp_path: Path) -> None:
    building = ModelBuild(model="minilm", since_s=time.time() - 20)
    worker = WorkerPresence(name="w", device="cpu", state="starting", building=building)
    with staged(tmp_path) as box:
        box.backing.fleet.announce(worker, ttl_s=600)
        holds = open_page(box.url).log_in(box.token).locator(".devices .holds")
        expect(holds).to_have_text(re.compile("^builds minilm for 2\\d\u202fs$"))
        worker = worker.model_copy(update={"state": "idle"})
        box.backing.fleet.announce(worker, ttl_s=600)
        expect(holds).to_have_text(re.compile("^free for a job · builds minilm for "))


def test_what_one_window_does_holds_in_the_others(open_page: Open, busy: Staged) -> None:
    first = open_page(busy.url).log_in(busy.token)
    second = first.context.new_page()
    second.goto(busy.url)
    second.get_by_role("button", name="Log out").click()
    expect(first.get_by_text("Your session is over: you logged out")).to_be_visible()
    second.get_by_label("Token").fill(busy.token)
    second.get_by_label("Token").press("Enter")
    expect(second.locator("#you")).to_have_text("ada")
    third = second.context.new_page()
    third.goto(busy.url)
    third.get_by_role("button", name="Log out").click()
    third.get_by_label("Token").fill(busy.owner_token)
    third.get_by_label("Token").press("Enter")
    expect(second.locator("#you")).to_have_text("owner")


def test_a_runs_curves_are_read_step_by_step(open_page: Open, busy: Staged) -> None:
    page = open_page(busy.url).log_in(busy.token, "runs")
    rows = page.locator(".runs-list tbody tr")
    expect(rows).to_have_count(2)  # ada's
    expect(rows.first).to_contain_text(re.compile(r"towers.*minilm.*adamw, lr 2e-5.*240"))
    rows.first.get_by_role("link").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="towers", level=1)).to_be_focused()
    loss = page.get_by_role("region", name="Loss")
    expect(loss.locator(".reading")).to_have_text(re.compile(r"^0\.\d+ at step 240$"))
    norm = page.get_by_role("region", name="Gradient norm")
    norm.get_by_role("img").focus()
    for key, number in (("ArrowLeft", 239), ("ArrowLeft", 238), ("ArrowRight", 239), ("Home", 1)):
        page.keyboard.press(key)
        expect(norm.locator(".reading")).to_have_text(re.compile(f" at step {number}$"))
    expect(loss.locator(".reading")).to_have_text(re.compile(" at step 240$"))
    page.keyboard.press("End")
    expect(norm.locator(".reading")).to_have_text(re.compile(" at step 240$"))
    loss.get_by_role("img").hover(position={"x": 70, "y": 60})
    expect(loss.locator(".reading")).to_have_text(re.compile(r" at step [1-3]$"))
    linear = loss.locator("path").get_attribute("d")
    page.get_by_role("button", name="Log", exact=True).click()
    expect(loss.locator("path")).not_to_have_attribute("d", str(linear))
    page.get_by_role("link", name="Runs").last.click()
    page.get_by_role("link", name=f"{3:032x}"[:8]).click()
    rates = page.get_by_role("region", name="Learning rate")
    expect(rates.locator(".legend .name")).to_have_text(["encoder.layer.5.*", "the rest"])
    expect(rates.locator("path")).to_have_count(2)


def test_a_run_is_shown_to_its_owner_and_to_the_boxs(open_page: Open, busy: Staged) -> None:
    of_grace = f"runs/{12:032x}"
    ada = open_page(busy.url)
    page = ada.log_in(busy.token, of_grace)
    expect(page.get_by_role("alert")).to_contain_text("No such run")
    expect(page.locator(".curves").first).to_be_hidden()
    assert all("404" in text for text in ada.wrong)
    ada.wrong.clear()
    owner = open_page(busy.url).log_in(busy.owner_token, "runs")
    expect(owner.get_by_label("Everybody's")).to_be_checked()
    owner.get_by_role("link", name="barlow").click()
    expect(owner.locator(".curves path").first).to_be_visible()


def test_a_store_is_granted_and_revoked_by_its_owner(open_page: Open, busy: Staged) -> None:
    page = open_page(busy.url).log_in(busy.token, "stores")
    rows = page.locator(".stores-list tbody tr")
    expect(rows).to_have_count(2)  # ada's, and the one that grace lets everybody read
    mine = rows.filter(has_text="wiki-train")
    expect(mine).to_contain_text(re.compile(r"ada.*minilm.*12000.*102\u202fMiB.*ekfac.*grace"))
    expect(rows.filter(has_text="shared").locator(".readers")).to_have_text("you")
    mine.get_by_role("link").click()
    expect(page.get_by_role("heading", name="wiki-train", level=1)).to_be_focused()
    people = page.locator(".grants li")
    page.get_by_label("Let somebody read").fill("sofia")
    page.get_by_role("button", name="Grant").click()
    expect(people).to_have_count(2)
    assert busy.backing.stores.get(STORE.partition("/")[2]).grants == ("grace", "sofia")  # type: ignore[union-attr]
    page.get_by_role("button", name="Revoke sofia").click()
    expect(people).to_have_text(["graceRevoke"])
    page.get_by_role("link", name="Stores").last.click()
    page.get_by_role("link", name="shared").click()
    expect(page.locator(".run-facts")).to_contain_text("Ownergrace")
    expect(page.locator(".grant")).to_be_hidden()


def test_use_is_shown_by_span_and_by_person(open_page: Open, busy: Staged) -> None:
    owner = open_page(busy.url).log_in(busy.owner_token, "use")
    people = owner.locator(".people tbody tr")
    expect(people).to_have_count(5)
    expect(people.first.locator("td").last).to_have_text(re.compile(r"\d\u202fGiB"))
    owner.get_by_role("button", name="Month").click()
    expect(owner.get_by_role("button", name="Month")).to_have_attribute("aria-pressed", "true")
    expect(owner.locator(".columns").first.locator("rect[class^=hue]").first).to_be_visible()
    ada = open_page(busy.url).log_in(busy.token, "use")
    expect(ada.locator(".people tbody th")).to_have_text(["ada", "everybody else"])


def test_a_user_sees_who_waits_but_no_names_of_others_jobs(open_page: Open, busy: Staged) -> None:
    page = open_page(busy.url).log_in(busy.token)
    show(page, busy.url, "")
    others = page.locator(".queue tbody tr").filter(has_text="grace")
    expect(others.first).to_be_visible()
    expect(page.locator(".queue")).not_to_contain_text("influence of batch 12")
    expect(others.get_by_role("button")).to_have_count(0)


def test_a_job_that_no_picture_of_the_box_had_is_listed(open_page: Open, tmp_path: Path) -> None:
    with staged(tmp_path) as box:
        page = open_page(box.url).log_in(box.token, "jobs")
        expect(page.get_by_text("You have no jobs yet")).to_be_visible()
        now_s = time.time()
        ended(box.backing, "brief", "ada", began_s=now_s - 0.01, ended_s=now_s)
        expect(page.locator(".jobs tbody tr .state")).to_have_text("done")


def test_a_model_that_cannot_be_built_says_why(open_page: Open, busy: Staged) -> None:
    page = open_page(busy.url).log_in(busy.token, "models")
    model = page.get_by_role("listitem").filter(has_text="llama-old")
    expect(model).to_contain_text("not usable")
    expect(model).to_contain_text("found none; check its source")


def test_five_hundred_jobs_are_shown_and_move(open_page: Open, tmp_path: Path) -> None:
    """The page is usable soon, and a change reaches it; the time is printed for the record."""
    with staged(tmp_path) as box:
        many_waiting(box.backing, num_jobs=500)
        visit = open_page(box.url)
        visit.log_in(box.owner_token)
        began = time.perf_counter()
        visit.page.goto(f"{box.url}/?again#/")
        visit.page.locator(".queue tbody tr").first.wait_for()
        seconds = time.perf_counter() - began
        print(f"usable after {seconds:.2f} s with 500 jobs")
        expect(visit.page.get_by_text("400 jobs behind those")).to_be_visible()
        visit.page.get_by_role("button", name="Show 85 more").click()
        expect(visit.page.locator(".queue tbody tr")).to_have_count(100)
        assert seconds < 30  # 1 s on a machine that does nothing else: docs/dashboard.md


def test_a_job_far_behind_is_cancelled_by_two_clicks(open_page: Open, tmp_path: Path) -> None:
    """The stream does not tell of it: the dialog asks for it, and must not take the button away."""
    with staged(tmp_path) as box:
        many_waiting(box.backing, num_jobs=150)
        page = open_page(box.url).log_in(box.owner_token, "jobs/many0140")
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("button", name="Cancel").click()
        page.wait_for_timeout(2000)  # a second click counts for four seconds
        dialog.get_by_role("button", name="Really cancel").click()
        expect(dialog.get_by_text("cancelled", exact=True)).to_be_visible()


def test_more_jobs_than_are_listed_are_said_and_not_asked_for(
    open_page: Open, tmp_path: Path
) -> None:
    with staged(tmp_path) as box:
        many_waiting(box.backing, num_jobs=250)
        page = open_page(box.url).log_in(box.owner_token, "jobs")
        page.get_by_label("Everybody's").check()
        expect(page.get_by_text("The newest 100 are shown")).to_be_visible()
        expect(page.locator(".jobs tbody tr")).to_have_count(100)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(4000)  # once in five seconds is what any list does
        assert len(asked) <= 1
        page.get_by_role("button", name="Running").click()
        expect(page.get_by_text("No job of yours is running")).to_be_visible()
        expect(page.get_by_text("The newest 100 are shown")).to_be_hidden()
