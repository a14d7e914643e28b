"""Sessions: a cookie in exchange for a token, worth nothing to other sites and after the token."""

from __future__ import annotations

import httpx
import pytest
import redis

from gradbox_service.backing import Backing
from gradbox_service.identity import sessions
from gradbox_service.identity.sessions import Sessions
from gradbox_service.identity.tokens import Tokens
from tests.service.boxes import submit
from tests.service.conftest import Box

OURS = {"X-Gradbox-Dashboard": "1"}


def browser(box: Box, *, base_url: str = "http://box") -> httpx.Client:
    """Return a client that keeps cookies and has no token."""
    return httpx.Client(transport=box.transport, base_url=base_url, headers=OURS)


def log_in(box: Box, name: str = "ann", *, base_url: str = "http://box") -> httpx.Client:
    client = browser(box, base_url=base_url)
    answer = client.post("/v1/session", json={"token": box.backing.tokens.create(name)})
    assert answer.json() == {"you": {"name": name, "admin": False}}
    return client


def test_a_session_stands_for_its_token(backing: Backing) -> None:
    token = backing.tokens.create("ann")
    secret = backing.sessions.begin(token)
    assert secret is not None
    found = backing.sessions.find(secret)
    assert found is not None
    assert found == backing.tokens.find(token)
    backing.sessions.end(secret)
    assert backing.sessions.find(secret) is None


def test_a_session_ends_with_its_token(backing: Backing) -> None:
    secret = backing.sessions.begin(backing.tokens.create("ann"))
    assert secret is not None
    backing.tokens.revoke("ann")
    assert backing.sessions.find(secret) is None


def test_the_oldest_of_many_sessions_of_a_token_ends(
    backing: Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 5)
    token, other = (
        backing.tokens.create("ann"),
        backing.sessions.begin(backing.tokens.create("bob")),
    )
    begun = [backing.sessions.begin(token) for _ in range(7)]
    found = [backing.sessions.find(str(secret)) is not None for secret in (other, *begun)]
    assert found == [True, False, False, True, True, True, True, True]


def test_no_session_begins_with_an_unknown_token(backing: Backing) -> None:
    assert backing.sessions.begin("gbx_nobody") is None
    assert backing.sessions.find("") is None


def test_redis_holds_no_secret_and_forgets_sessions(connection: redis.Redis) -> None:
    tokens = Tokens(connection)
    token = tokens.create("ann")
    secret = Sessions(connection, tokens=tokens).begin(token)
    assert secret is not None
    keys = [key.decode() for key in connection.keys("*")]  # type: ignore[union-attr]
    stored = repr([(key, connection.dump(key)) for key in keys])
    assert secret not in stored
    assert token not in stored
    (session,) = [key for key in keys if key.startswith("gradbox:session:")]
    assert 0 < connection.ttl(session) <= 7 * 24 * 3600  # type: ignore[operator]


def test_a_cookie_opens_what_its_token_opens(box: Box) -> None:
    client = log_in(box)
    job_id = submit(client)
    assert client.get("/v1/session").json()["you"]["name"] == "ann"
    assert client.get(f"/v1/jobs/{job_id}").status_code == 200
    assert client.delete("/v1/session").status_code == 204
    assert client.get("/v1/jobs").status_code == 401
    assert client.get("/v1/session").json() == {"you": None}


@pytest.mark.parametrize(("scheme", "secure"), [("http", False), ("https", True)])
def test_no_script_and_no_other_site_gets_the_cookie(
    small_box: Box, scheme: str, secure: bool
) -> None:
    client = browser(small_box, base_url=f"{scheme}://box:8642")
    token = small_box.backing.tokens.create("ann")
    sent = client.post("/v1/session", json={"token": token}).headers["set-cookie"].lower()
    assert sent.startswith("gradbox-8642=")
    assert "httponly" in sent
    assert "samesite=strict" in sent
    assert ("secure" in sent) is secure
    assert token.lower() not in sent


def test_a_request_by_cookie_that_another_site_made_is_refused(small_box: Box) -> None:
    client = log_in(small_box)
    job_id = submit(client)
    url = f"/v1/jobs/{job_id}"
    del client.headers["X-Gradbox-Dashboard"]
    answer = client.delete(url)
    assert answer.status_code == 403
    assert "X-Gradbox-Dashboard" in answer.json()["detail"]
    forged = {**OURS, "Sec-Fetch-Site": "cross-site"}
    assert client.delete(url, headers=forged).status_code == 403
    assert client.post("/v1/session", json={"token": "x"}).status_code == 403
    assert client.delete("/v1/session").status_code == 403
    assert client.get(url).json()["state"] == "queued"
    assert client.delete(url, headers=OURS).status_code == 202


def test_a_wrong_token_is_refused_with_what_to_do(small_box: Box) -> None:
    answer = browser(small_box).post("/v1/session", json={"token": "gbx_no"})
    assert answer.status_code == 401
    assert "gradbox tokens create" in answer.json()["detail"]


def test_a_session_is_over_with_its_token_over_http(small_box: Box) -> None:
    client = log_in(small_box, "bob")
    small_box.backing.tokens.revoke("bob")
    answer = client.get("/v1/jobs")
    assert answer.status_code == 401
    assert "log in again" in answer.json()["detail"]
