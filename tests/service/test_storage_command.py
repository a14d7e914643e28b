"""`gradbox storage` on the data and the Redis of a box."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradbox.cli.exits import run_alone
from gradbox_service.backing import Backing
from gradbox_service.commands.storage import register
from gradbox_service.settings import Settings
from tests.service.boxes import a_record, a_spec
from tests.service.test_cleaning import put_blob, put_result
from tests.service.test_server import running


@pytest.fixture
def where(redis_settings: Settings) -> tuple[str, ...]:
    return ("--redis-url", str(redis_settings.redis_url), "--data", str(redis_settings.data))


@pytest.fixture
def backing(redis_settings: Settings) -> Backing:
    return Backing.on_redis(redis_settings)


def run(*arguments: str) -> int:
    return run_alone(register, ["storage", *arguments])


def test_it_lists_what_each_owner_takes(
    backing: Backing, where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    blob = put_blob(backing, owner="ann")
    put_result(backing, "a" * 32, owner="bob")
    assert run(*where, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    size_bytes = backing.blobs.size_bytes(blob)
    none = {"blob_bytes": 0, "result_bytes": 0, "run_bytes": 0, "store_bytes": 0}
    assert report["owners"] == [
        none | {"owner": "ann", "blob_bytes": size_bytes},
        none | {"owner": "bob", "result_bytes": 6},
    ]
    assert report["free_bytes"] > report["reserve_bytes"] > 0
    assert run(*where) == 0
    assert "bob" in capsys.readouterr().out


def test_the_reserve_is_the_one_that_the_box_was_started_with(
    redis_settings: Settings, where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(redis_settings, "--disk-reserve-bytes", "12345"):
        assert run(*where, "--json") == 0
    assert json.loads(capsys.readouterr().out)["reserve_bytes"] == 12345


def test_it_cleans_by_age_owner_and_kind(
    backing: Backing, where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    anns = put_blob(backing, owner="ann", days=4, size=1)
    bobs = put_blob(backing, owner="bob", days=4, size=2)
    new = put_blob(backing, owner="ann", days=2, size=3)
    old = put_result(backing, "a" * 32, days=4)
    assert run("clean", "--older-than", "3d", *where, "--dry-run") == 0
    assert "would remove 3 files" in capsys.readouterr().out
    assert run("clean", "--older-than", "3d", "--owner", "bob", "--json", *where) == 0
    (gone,) = json.loads(capsys.readouterr().out)["removed"]
    assert (gone["name"], gone["owners"]) == (bobs, ["bob"])
    assert run("clean", "--older-than", "3d", "--only", "blobs", *where) == 0
    assert anns in capsys.readouterr().out
    assert old.exists()
    assert run("clean", "--older-than", "72h", *where) == 0
    assert "a" * 32 in capsys.readouterr().out
    assert not old.exists()
    assert backing.blobs.size_bytes(new) is not None


def test_it_removes_nothing_that_a_job_needs(
    backing: Backing, where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    blob = put_blob(backing, days=9)
    spec = a_spec(weights={"layer.bias": {"blob": blob, "tensor": "x"}})
    backing.records.create(a_record("waits"), spec=spec)
    assert run("clean", "--older-than", "0s", *where) == 0
    assert "removed 0 files" in capsys.readouterr().out


@pytest.mark.parametrize("age", ["3", "d", "-1d", "3 days"])
def test_it_refuses_what_is_no_age(
    age: str, where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("clean", f"--older-than={age}", *where) == 2
    assert "such as 90m, 12h or 3d" in capsys.readouterr().err


def test_it_says_that_no_box_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--data", str(tmp_path)) == 3
    assert "cannot be reached" in capsys.readouterr().err
