"""Models over HTTP: what is usable, what is not and why, and who may have them read again."""

from __future__ import annotations

import re
import time

import pytest

from gradbox.cli.top import device_rows
from gradbox.http.connection import parsed
from gradbox.protocol import BoxView, ModelBuild
from gradbox_service.backing import Backing
from gradbox_service.fleet import WorkerPresence
from gradbox_service.fleet.workers import unusable_models
from tests.service.boxes import MODEL, SHARDS, spec_for, upload
from tests.service.conftest import Box

WHY = "models.big: expected its weights to fit into the device's memory"


def announce_unusable(backing: Backing, *, name: str = "worker-2", reloads: int = 0) -> None:
    presence = WorkerPresence(
        name=name, device="cpu", state="idle", unusable={"big": WHY}, reloads=reloads
    )
    backing.fleet.announce(presence, ttl_s=600.0)


def test_a_model_that_cannot_be_built_is_listed_with_its_reason(box: Box) -> None:
    announce_unusable(box.backing)
    big, tiny = box.client.get("/v1/models").json()["models"]
    assert (big["name"], big["usable"], big["reason"]) == ("big", False, WHY)
    assert (tiny["name"], tiny["usable"], tiny["reason"]) == ("tiny", True, "")
    assert box.client.get("/v1/models/big").json() == big


def test_a_job_for_it_is_refused_with_the_reason(box: Box) -> None:
    announce_unusable(box.backing)
    answer = box.client.post("/v1/jobs", json=spec_for(upload(box.client, SHARDS), model="big"))
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:gradbox:problem:unusable-model"
    assert WHY in answer.json()["detail"]


def test_what_one_worker_can_build_is_usable() -> None:
    able = WorkerPresence(name="a", device="cuda:0", state="idle", models={"big": "v"})
    unable = WorkerPresence(name="b", device="cpu", state="idle", unusable={"big": WHY, "c": "no"})
    assert unusable_models([able, unable]) == {"c": "no"}


def test_a_reload_is_for_the_owner(box: Box) -> None:
    answer = box.client.post("/v1/models/reload")
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:gradbox:problem:owner-only")
    assert box.backing.fleet.reloads() == 0


def test_a_reload_names_the_workers_that_have_not_read_the_file_yet(box: Box) -> None:
    announce_unusable(box.backing)
    owner = {"Authorization": f"Bearer {box.backing.tokens.create('root', admin=True)}"}
    answer = box.client.post("/v1/models/reload", headers=owner)
    assert answer.status_code == 202
    assert answer.json()["reloading"] == ["worker-1", "worker-2"]
    announce_unusable(box.backing, reloads=1)
    assert box.client.get("/v1/models").json()["reloading"] == ["worker-1"]


@pytest.mark.parametrize("times", [0, 2])
def test_reloads_are_counted(backing: Backing, times: int) -> None:
    for number in range(1, times + 1):
        assert backing.fleet.ask_for_reload() == number
    assert backing.fleet.reloads() == times


def test_a_description_travels_whole(backing: Backing) -> None:
    view = MODEL.model_copy(update={"size_bytes": 24})
    backing.fleet.describe([view])
    assert backing.fleet.model("tiny", version=MODEL.version) == view


def test_a_model_that_is_being_built_is_named_and_since_when(box: Box) -> None:
    building = ModelBuild(model="big", since_s=time.time() - 70)
    presence = WorkerPresence(name="worker-1", device="cpu", state="starting", building=building)
    box.backing.fleet.announce(presence, ttl_s=600.0)
    detail = box.client.get("/readyz").json()["detail"]
    assert re.search(r"no worker is ready: one builds the model 'big' for 7\d s", detail), detail
    view = parsed(BoxView, box.client.get("/v1/box"))
    assert view.devices[0].building == building
    assert "starting, builds big for 1 min" in device_rows(view)[1][2]
    presence = presence.model_copy(update={"state": "idle"})
    box.backing.fleet.announce(presence, ttl_s=600.0)
    ready = box.client.get("/readyz").json()
    assert ready["ready"]
    assert ready["builds"].startswith("builds the model 'big' for 7")
