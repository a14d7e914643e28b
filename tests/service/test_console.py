"""What `gradbox up` says of how others reach the box."""

from __future__ import annotations

import socket
from pathlib import Path

from gradbox_service.up.console import how_to_reach

HERE = socket.gethostname()
URL = "http://127.0.0.1:8642"


def said(*, host: str, public_url: str | None = None) -> str:
    return how_to_reach(URL, host=host, public_url=public_url, data=Path("/data"))


def test_a_box_on_all_addresses_names_its_host_and_the_tunnel() -> None:
    text = said(host="0.0.0.0")
    assert f"gradbox login --url http://{HERE}:8642" in text
    assert "ssh -L 8642:127.0.0.1:8642 " in text
    assert text.count(HERE) == 2


def test_a_box_on_loopback_is_reached_through_a_tunnel_alone() -> None:
    text = said(host="127.0.0.1")
    assert f"http://{HERE}" not in text
    assert "ssh -L 8642:127.0.0.1:8642 " in text


def test_the_public_address_is_the_one_that_others_are_told() -> None:
    text = said(host="0.0.0.0", public_url="https://box.lab")
    assert "gradbox login --url https://box.lab" in text
    assert f"http://{HERE}" not in text
