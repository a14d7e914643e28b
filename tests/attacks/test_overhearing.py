"""Beyond this machine the service speaks TLS, or somebody said that it need not."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from gradbox import GradClient, Retry, ServiceUnavailable
from gradbox_service.http.listening import check_exposure, is_loopback
from gradbox_service.settings import BadSettings, Settings
from proofs.attacks.services import Service, answer_of, running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, with that of who vouches for it, and its key."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    for part in (*issued.cert_chain_pems, authority.cert_pem):
        part.write_to_path(cert, append=True)
    issued.private_key_pem.write_to_path(key)
    return cert, key


@pytest.mark.parametrize(
    ("command", "host"),
    [(("service",), "0.0.0.0"), (("service",), "::"), (("up", "--models", __file__), "192.0.2.1")],
)
def test_an_address_that_others_reach_wants_tls_or_a_word(
    tmp_path: Path, command: tuple[str, ...], host: str
) -> None:
    arguments = [*command, "--host", host, "--port", "0", "--data", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "gradbox", *arguments],
        env=os.environ | {"GRADBOX_REDIS_URL": "redis://127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 2
    assert f"{host} is reached over the network" in done.stderr
    assert "--tls-cert" in done.stderr
    assert "--insecure" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_insecure_is_said_loudly() -> None:
    said = check_exposure(Settings(host="0.0.0.0", insecure=True))
    assert said is not None
    assert said.startswith("INSECURE: ")
    assert check_exposure(Settings(host="127.0.0.1")) is None


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("box.example", False),
        ("127.0.0.1.example", False),
    ],
)
def test_only_loopback_is_this_machine_alone(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


def test_half_a_pair_of_tls_files_is_refused(certificate: tuple[Path, Path]) -> None:
    with pytest.raises(BadSettings, match="both"):
        check_exposure(Settings(tls_cert=certificate[0]))
    with pytest.raises(BadSettings, match="found none"):
        check_exposure(Settings(tls_cert=certificate[0], tls_key=Path("/nowhere")))


def test_files_that_are_no_pair_are_said(
    settings: Settings, certificate: tuple[Path, Path]
) -> None:
    cert, _ = certificate
    arguments = ["--tls-cert", str(cert), "--tls-key", str(cert), "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "gradbox_service", *arguments, "--data", str(settings.data)],
        env=os.environ | {"GRADBOX_REDIS_URL": str(settings.redis_url)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 2
    assert "are no certificate and its key" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def encrypted(settings: Settings, certificate: tuple[Path, Path]) -> Iterator[Service]:
    """A service that speaks TLS."""
    cert, key = certificate
    with running(settings, "--tls-cert", str(cert), "--tls-key", str(key)) as service:
        yield service


def test_with_a_certificate_the_service_speaks_tls_alone(
    encrypted: Service, certificate: tuple[Path, Path]
) -> None:
    assert encrypted.url.startswith("https://127.0.0.1:")
    headers = {"Authorization": f"Bearer {encrypted.token_of('ann')}"}
    trusting = ssl.create_default_context(cafile=certificate[0])
    with httpx.Client(base_url=encrypted.url, verify=trusting, trust_env=False) as client:
        assert client.get("/v1/jobs", headers=headers).status_code == 200
    assert not answered_in_the_clear(encrypted)


def test_the_client_trusts_whom_the_environment_says_also_on_this_machine(
    encrypted: Service, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = encrypted.token_of("ann")
    once = Retry(patience_s=0.0)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(ServiceUnavailable, match=r"CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE names"):
        GradClient(encrypted.url, token, retry=once).jobs()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    GradClient(encrypted.url, token, retry=once).jobs()  # is answered


def test_https_where_nobody_speaks_tls_is_said(service: Service) -> None:
    url = service.url.replace("http:", "https:")
    with pytest.raises(ServiceUnavailable, match="is the address http:// instead"):
        GradClient(url, service.token_of("ann"), retry=Retry(patience_s=0.0)).jobs()


def answered_in_the_clear(service: Service) -> bool:
    with service.connect() as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: box\r\n\r\n")
        return answer_of(connection).startswith(b"HTTP/")
