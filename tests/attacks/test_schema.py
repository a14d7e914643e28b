"""Whatever can be said in the terms of /openapi.json, the service answers it, as that says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradbox_service.settings import Settings
from proofs.attacks.services import Service, running
from tests.service.boxes import submit

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "missing_required_header",
)


@pytest.fixture(scope="module")
def service(settings: Settings) -> Iterator[Service]:
    """A service that takes what a fuzzer sends as fast as it sends it."""
    with running(settings, "--requests-per-s", "1000000") as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_fits_the_schema_or_just_does_not_is_answered_as_it_says(service: Service) -> None:
    """schemathesis in all of its phases; stateful ones follow what answers refer to."""
    client = service.client_of("ann")
    submit(client)
    command = [str(Path(sys.executable).parent / "schemathesis"), "run"]
    command += [f"{service.url}/openapi.json"]
    command += ["--header", f"Authorization: {client.headers['Authorization']}"]
    command += ["--checks", ",".join(CHECKS), "--max-examples", "25", "--seed", "20261122"]
    done = subprocess.run(
        [*command, "--no-color", "--continue-on-failure"],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Stateful" in done.stdout
    assert service.process.poll() is None
    assert client.get("/livez").status_code == 200
