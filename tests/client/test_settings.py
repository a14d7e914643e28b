"""Where URL and token are found, in which order, and who may read them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gradbox import ServiceUnavailable, Unauthorized
from gradbox.settings import (
    ClientSettings,
    find_settings,
    login_file,
    read_settings,
    write_settings,
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place lies under the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("GRADBOX_URL", "GRADBOX_TOKEN", "GRADBOX_DATA"):
        monkeypatch.delenv(name, raising=False)


def keep(path: Path, name: str) -> None:
    write_settings(path, ClientSettings(url=f"http://{name}", token=f"token of {name}"))


def test_the_first_place_that_says_something_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(login_file(), "login")
    assert find_settings().url == "http://login"
    keep(Path("gradbox-data/client.toml"), "here")
    assert find_settings().token == "token of here"
    keep(Path("data/client.toml"), "data")
    monkeypatch.setenv("GRADBOX_DATA", "data")
    assert find_settings().url == "http://data"
    monkeypatch.setenv("GRADBOX_URL", "http://set/")
    monkeypatch.setenv("GRADBOX_TOKEN", "token set")
    assert find_settings() == ClientSettings(url="http://set", token="token set")
    assert find_settings("http://given", "t").url == "http://given"


def test_a_token_goes_only_to_the_box_that_it_was_kept_for() -> None:
    keep(login_file(), "mine")
    assert find_settings("http://mine/").token == "token of mine"
    with pytest.raises(Unauthorized, match="gradbox login --url http://other"):
        find_settings("http://other")


def test_no_address_says_what_to_do() -> None:
    with pytest.raises(ServiceUnavailable, match=r"gradbox up.*gradbox login.*GRADBOX_URL"):
        find_settings()


@pytest.mark.parametrize(
    "url",
    [
        "box:8642",
        "ftp://box",
        "http://",
        "nonsense",
        "http://box:port",
        "http://[::1",
        "http://a..b",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ServiceUnavailable, match=r"http://127\.0\.0\.1:8642"):
        find_settings(url, "token")


@pytest.mark.parametrize("token", ["clé", "a\nb", "tab\t"])
def test_a_token_that_no_header_carries_is_refused(token: str) -> None:
    with pytest.raises(Unauthorized, match="printable ASCII") as caught:
        find_settings("http://box", token)
    assert token not in str(caught.value)


def test_nobody_else_reads_the_kept_token() -> None:
    path = login_file()
    keep(path, "box")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["client.toml"]


@pytest.mark.parametrize("text", [b"url = ", b'url = "http://box"', b"\x00", b"\xff"])
def test_a_file_that_cannot_be_used_is_named(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "client.toml"
    path.write_bytes(text)
    with pytest.raises(Unauthorized, match=r"client\.toml"):
        read_settings(path)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "client.toml"
    path.write_text('url = "http://box"\ntoken = "t"\n', encoding="utf-8-sig")
    assert read_settings(path) == ClientSettings(url="http://box", token="t")


def test_a_token_does_not_show_where_settings_are_printed() -> None:
    assert "secret" not in repr(ClientSettings(url="http://box", token="secret"))
