"""Tokens: shown once, stored hashed, and worthless once revoked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis

from gradbox.cli.exits import run_alone
from gradbox_service.backing import Backing
from gradbox_service.commands.tokens import register
from gradbox_service.identity.tokens import BadTokenName, Tokens
from gradbox_service.up.embedded_redis import EmbeddedRedis
from tests.service.conftest import Box


def owner_of(tokens: Tokens, token: str) -> str:
    found = tokens.find(token)
    assert found is not None
    return found.name


def test_a_token_belongs_to_its_name(backing: Backing) -> None:
    ann, bob = backing.tokens.create("ann"), backing.tokens.create("bob")
    assert owner_of(backing.tokens, ann) == "ann"
    assert owner_of(backing.tokens, bob) == "bob"
    assert backing.tokens.find(ann + "x") is None
    assert backing.tokens.find("") is None


def test_only_a_token_made_for_it_is_the_box_owners(backing: Backing) -> None:
    roles = {"ann": False, "root": True}
    for name, admin in roles.items():
        found = backing.tokens.find(backing.tokens.create(name, admin=admin))
        assert found is not None
        assert found.admin is admin
    assert {info.name: info.admin for info in backing.tokens.list()} == roles


def test_one_of_a_names_tokens_or_all_are_revoked(backing: Backing) -> None:
    tokens = backing.tokens
    first, second, third = (tokens.create("ann") for _ in range(3))
    listed = tokens.list()
    assert [info.name for info in listed] == ["ann"] * 3
    assert tokens.revoke(listed[0].id) == 1
    assert tokens.find(first) is None
    assert owner_of(tokens, second) == "ann"
    assert tokens.revoke("ann") == 2
    assert tokens.find(third) is None
    assert tokens.revoke("ann") == 0


@pytest.mark.parametrize("name", ["", "two words", "x" * 101, "tab\t"])
def test_an_unreadable_name_is_refused(backing: Backing, name: str) -> None:
    with pytest.raises(BadTokenName, match="1 to 100 printable characters"):
        backing.tokens.create(name)


def test_redis_never_holds_a_token(connection: redis.Redis) -> None:
    token = Tokens(connection).create("ann")
    stored = repr([connection.dump(key) for key in connection.keys("*")])
    assert stored != "[]"
    assert token not in stored
    assert token.removeprefix("gbx_")[:20] not in stored


def test_a_revoked_token_opens_nothing(box: Box) -> None:
    assert box.client.get("/v1/jobs").status_code == 200
    box.backing.tokens.revoke("ann")
    assert box.client.get("/v1/jobs").status_code == 401


def test_a_revocation_that_redis_refuses_fails_and_says_so(
    connection: redis.Redis, redis_server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    token = Tokens(connection).create("eve")
    connection.replicaof("127.0.0.1", 1)  # it refuses every change, as while its disk is full
    try:
        assert run("revoke", "eve", "--redis-url", redis_server.url) == 3
        assert "is a replica" in capsys.readouterr().err
        assert Tokens(connection).find(token) is not None
    finally:
        connection.replicaof("NO", "ONE")


def run(*arguments: str) -> int:
    return run_alone(register, ["tokens", *arguments])


def test_the_command_creates_lists_and_revokes(
    redis_server: EmbeddedRedis, connection: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--redis-url", redis_server.url, "--json")
    assert run("create", "ann", *where) == 0
    token = json.loads(capsys.readouterr().out)["token"]
    assert owner_of(Tokens(connection), token) == "ann"
    assert run("list", *where) == 0
    (info,) = json.loads(capsys.readouterr().out)
    assert info["name"] == "ann"
    assert token not in str(info)
    assert run("revoke", info["id"], *where) == 0
    assert Tokens(connection).find(token) is None
    assert run("revoke", info["id"], *where) == 2


def test_the_command_makes_admin_tokens(
    redis_server: EmbeddedRedis, connection: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--redis-url", redis_server.url)
    assert run("create", "root", "--admin", "--json", *where) == 0
    found = Tokens(connection).find(json.loads(capsys.readouterr().out)["token"])
    assert found is not None
    assert found.admin
    assert run("list", *where) == 0
    assert "admin  root" in capsys.readouterr().out


def test_the_command_prints_the_token_alone(
    redis_server: EmbeddedRedis, connection: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("create", "ann", "--redis-url", redis_server.url) == 0
    token = capsys.readouterr().out.strip()
    assert owner_of(Tokens(connection), token) == "ann"


def test_the_command_finds_the_redis_of_a_data_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = EmbeddedRedis.start(tmp_path / "redis")
    try:
        assert run("create", "ann", "--data", str(tmp_path)) == 0
    finally:
        server.stop()
    assert run("list", "--data", str(tmp_path)) == 3
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["foo", "redis://:secret@box:port"])
def test_the_command_refuses_what_is_no_address(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("list", "--redis-url", url) == 2
    said = capsys.readouterr().err
    assert "such as redis://127.0.0.1:6379, got" in said
    assert "secret" not in said


def test_the_command_refuses_a_bad_name(
    redis_server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("create", "two words", "--redis-url", redis_server.url) == 2
    assert "printable" in capsys.readouterr().err
