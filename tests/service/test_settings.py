"""Settings come from arguments, then from the environment, then from their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradbox.cli.exits import run_alone
from gradbox_service.settings import BadSettings, Settings, arguments_of, takes_settings

FOUND: list[Settings] = []


@takes_settings()
def command(given: dict[str, Any]) -> int:
    FOUND.append(Settings.read(**given))
    return 0


def run(*arguments: str) -> int:
    return run_alone(lambda app: app.command("any")(command), ["any", *arguments])


def parsed(*arguments: str) -> Settings:
    assert run(*arguments) == 0
    return FOUND.pop()


def test_arguments_win_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PORT", "1"), ("HOST", "h"), ("REDIS_URL", "unix://x")):
        monkeypatch.setenv(f"GRADBOX_{name}", value)
    settings = Settings.read(port="2", data=str(tmp_path), host=None)
    assert (settings.port, settings.host, settings.redis_url) == (2, "h", "unix://x")
    assert settings.data == tmp_path


def test_every_setting_is_a_flag_and_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("--max-blob-bytes", "77").max_blob_bytes == 77
    monkeypatch.setenv("GRADBOX_MAX_BLOB_BYTES", "78")
    assert parsed().max_blob_bytes == 78


def test_every_setting_says_what_it_is() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("port", ["x", "-1", "65536", ""])
def test_a_port_is_a_number(port: str) -> None:
    with pytest.raises(BadSettings, match=r"port.*--port or GRADBOX_PORT"):
        Settings.read(port=port)


def test_a_limit_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADBOX_MAX_SPEC_BYTES", "8 MB")
    with pytest.raises(BadSettings, match=r"max_spec_bytes.*'8 MB'"):
        Settings.read()


def test_a_variable_with_nearly_the_name_of_a_setting_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for variable in ("GRADBOX_RESULT_AGES_S", "GRADBOX_TOKEN", "GRADBOX_PORT", "RADBOX_PORT"):
        monkeypatch.setenv(variable, "1")
    Settings.read()
    (record,) = caplog.records
    assert record.getMessage() == (
        "nothing reads GRADBOX_RESULT_AGES_S, which is set; did you mean GRADBOX_RESULT_AGE_S?"
    )


def test_arguments_of_settings_read_back_as_the_same() -> None:
    origins = ("--cors-origin", "http://a:1", "--cors-origin", "https://b")
    settings = parsed("--max-spec-bytes", "5", "--drain-s", "2.5", "--data", "/x", *origins)
    assert parsed(*arguments_of(settings)) == settings


def test_origins_are_given_one_by_one_or_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADBOX_CORS_ORIGIN", "http://a:1, https://B")
    assert parsed().cors_origin == ("http://a:1", "https://b")
    assert parsed("--cors-origin", "https://c").cors_origin == ("https://c",)
    monkeypatch.setenv("GRADBOX_CORS_ORIGIN", "")
    assert parsed().cors_origin == ()


@pytest.mark.parametrize("origin", ["*", "lab.example.org", "https://b/", "https://b/page", "null"])
def test_what_no_browser_calls_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(BadSettings, match=r"such as https://lab\.example\.org.*--cors-origin"):
        Settings.read(cors_origin=[origin])


def test_the_help_of_every_setting_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(f"GRADBOX_{name.upper()}" in printed for name in Settings.model_fields)
    assert "5 % of the" in printed
