"""What a service process is given, by arguments or by the environment.

Every field below is a setting: `max_blob_bytes` is `GRADBOX_MAX_BLOB_BYTES` in the environment and
`--max-blob-bytes` on the command lines of `gradbox service` and `gradbox up`. An argument wins over
the environment.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gradbox.errors import GradboxError
from gradbox.settings import NOTED

log = logging.getLogger(__name__)

GIB = 2**30
MIB = 2**20
DAY_S = 24 * 3600.0
KIB = 2**10

Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# As browsers name it.
Origin = Annotated[
    str, StringConstraints(strip_whitespace=True, to_lower=True, pattern=r"^https?://[^/\s]+$")
]
# A variable holds several with commas between them.
Origins = Annotated[
    tuple[Origin, ...],
    NoDecode,
    BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given),
]

# Settings of the Redis that `gradbox up` brings; a service alone has none.
EMBEDDED = ("fsync", "redis_memory_bytes")


class BadSettings(GradboxError, ValueError):
    """A setting is missing or cannot be used."""

    code = "bad-settings"
    title = "A setting cannot be used"
    category = "user"


class Settings(BaseSettings):
    """The settings of one service process. The text below each is its help on the command line."""

    model_config = SettingsConfigDict(
        env_prefix="GRADBOX_",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    redis_url: str | None = None
    """address of Redis; `gradbox up` brings its own"""
    data: Path = Path("gradbox-data")
    """folder of blobs and results, shared with the workers"""
    host: str = "127.0.0.1"
    """address to listen on"""
    port: Annotated[int, Field(ge=0, le=65535)] = 8642
    """port to listen on, 0 for a free one"""
    tls_cert: Path | None = None
    """certificate chain in PEM; with it the service speaks TLS"""
    tls_key: Path | None = None
    """private key of the certificate, in PEM"""
    insecure: bool = False
    """listen without TLS on an address that others reach"""
    cors_origin: Origins = ()
    """origin of pages that may call the box, such as https://lab.example.org; repeat for more"""

    max_blob_bytes: Bytes = 64 * GIB
    """largest blob that is taken"""
    max_spec_bytes: Bytes = 8 * MIB
    """largest posted job that is taken"""
    max_spec_values: Count = 100_000
    """most values in a posted job: its commas and opening brackets together"""
    max_head_bytes: Bytes = 64 * KIB
    """largest request line and headers together"""
    head_timeout_s: Seconds = 30.0
    """how long a request's headers may take"""
    body_timeout_s: Seconds = 60.0
    """how long 64 KiB of a request's body or an answer may take, or what is left of it"""

    requests_per_s: Count = 300
    """requests a second that one user may send; four times as many at once"""
    max_queued_jobs: Count = 1000
    """jobs of one user that may wait or run"""
    share_half_life_s: Annotated[float, Field(ge=60, allow_inf_nan=False)] = 6 * 3600.0
    """when a used device second counts half in whose turn it is"""
    max_event_streams: Count = 200
    """event streams that one user may have open"""
    max_transfers: Count = 100
    """uploads and downloads that one user may have open"""
    max_timeout_s: Seconds = 24 * 3600.0
    """longest `timeout_s` that a job may ask for"""

    max_attempts: Count = 3
    """how often a job is begun before a lost worker ends it"""
    drain_s: Seconds = 10.0
    """how long open requests may take when the service stops"""

    disk_reserve_bytes: Bytes | None = None
    """what stays free on the disk; the larger of 1 GiB and 5 % of the disk if not given"""
    owner_quota_bytes: Bytes | None = None
    """what one owner's blobs, results and states may take together; without it there is no limit"""
    storage_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """what all blobs and results may take of the room there is: theirs and what is free"""
    result_age_s: Seconds = 7 * DAY_S
    """when a result goes that nobody has read for so long"""
    blob_age_s: Seconds = 30 * DAY_S
    """when a blob goes that nobody has used for so long"""
    record_age_s: Seconds = 90 * DAY_S
    """when the record of a job goes, after the job's end"""
    run_age_s: Seconds = 30 * DAY_S
    """when a run goes that has made no step for so long, unless states of it are saved"""
    store_age_s: Seconds = 90 * DAY_S
    """when a store goes that nobody has added to or read for so long, unless others may read it"""
    clean_every_s: Seconds = 60.0
    """how often expired results, blobs, records, runs and stores are looked for"""

    fsync: Literal["everysec", "always"] = "everysec"
    """when the embedded Redis flushes to disk; everysec may lose a second in a power cut"""
    redis_memory_bytes: Bytes = 2 * GIB
    """what the embedded Redis may take; new jobs are refused before it is reached"""

    @classmethod
    def read(cls, **given: Any) -> Settings:
        """Return what the environment says; of `given`, what is not None wins.

        Raises:
            BadSettings: one of them cannot be used; the message names it.
        """
        try:
            found = cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            name = str(item["loc"][0])
            raise BadSettings(
                f"{name}: expected {cls.model_fields[name].description}, got {item['input']!r} "
                f"({item['msg']}); give {_flag(name)} or GRADBOX_{name.upper()}"
            ) from None
        _warn_of_near_misses(cls.model_fields)
        return found.model_copy(update={"data": found.data.expanduser()})

    def make_data_folder(self) -> None:
        """Make the data folder, which only the box's own user reads, where there is none yet.

        Raises:
            BadSettings: there cannot be such a folder, or this user cannot write into it.
        """
        try:
            self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
            why = None if os.access(self.data, os.W_OK | os.X_OK) else "Permission denied"
        except OSError as error:
            why = error.strerror
        if why is not None:
            raise BadSettings(
                f"expected a data folder that can be written, got {self.data}: {why}; give another "
                f"one with --data or GRADBOX_DATA"
            )

    def note(self) -> None:
        """Write into the data folder what this service was started with.

        Raises:
            OSError: the disk takes nothing.
        """
        beside = self.data / f".{NOTED}"
        beside.write_text(self.model_dump_json(exclude_defaults=True, exclude={"redis_url"}))
        beside.replace(self.data / NOTED)


def make_files_private() -> int:
    """Let nobody else read what this process makes from now on; return the umask of before."""
    return os.umask(0o077)


def _warn_of_near_misses(names: Iterable[str]) -> None:
    """Warn of variables of the environment whose name is nearly that of a setting."""
    known = [f"GRADBOX_{name.upper()}" for name in names]
    for variable in sorted(set(os.environ).difference(known)):
        near = difflib.get_close_matches(variable, known, n=1, cutoff=0.9)
        if near and variable.startswith("GRADBOX_"):
            log.warning("nothing reads %s, which is set; did you mean %s?", variable, near[0])


def takes_settings(
    *, leave_out: tuple[str, ...] = ()
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that gives a Typer command an option for every setting.

    The command gets them as its keyword argument `given`, a dictionary for `Settings.read` in
    which what was not given is None.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        names = [name for name in Settings.model_fields if name not in leave_out]
        own = inspect.signature(command, eval_str=True)
        parameters = [_option(name) for name in names]
        parameters += [own.parameters[name] for name in own.parameters if name != "given"]

        @functools.wraps(command)
        def run(**arguments: Any) -> int:
            given = {name: arguments.pop(name) for name in names}
            return command(given=given, **arguments)

        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def arguments_of(settings: Settings, *, leave_out: tuple[str, ...] = ()) -> list[str]:
    """Return the command line that gives these settings, without those left at their defaults."""
    arguments = []
    for name, value in settings:
        if name in leave_out or value == Settings.model_fields[name].default:
            continue
        for one in value if isinstance(value, tuple) else [value]:
            arguments += [_flag(name)] if one is True else [_flag(name), str(one)]
    return arguments


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _option(name: str) -> inspect.Parameter:
    import typer  # here: a device reads settings too, and has no command line

    field = Settings.model_fields[name]
    default = "" if field.default in (None, False, ()) else f", {field.default}"
    described = f"{field.description} (GRADBOX_{name.upper()}{default})"
    kind: Any = bool if field.annotation is bool else str
    if isinstance(field.default, tuple):
        kind = list[str]
    if kind is bool:
        option = typer.Option(help=described)
    else:
        # As text: `Settings.read` says what was expected in the words of the setting.
        option = typer.Option(metavar=name.rpartition("_")[2].upper(), help=described)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )
