"""What one user may ask of a box that others share."""

from __future__ import annotations

from gradbox.errors import InvalidJob, OwnerOnly, QueueFull
from gradbox.protocol import CotangentGradientSpec, JobSpec
from gradbox.protocol.options import DEFAULT_TIMEOUT_S
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.settings import Settings


def check_values(body: bytes, *, settings: Settings) -> None:
    """Count the values in a body before it is parsed: each of them costs memory and time then.

    Raises:
        InvalidJob: there are more than the box takes.
    """
    num_values = sum(body.count(mark) for mark in b",[{")
    if num_values > settings.max_spec_values:
        raise InvalidJob(
            f"the body: expected at most {settings.max_spec_values} values in a job (commas and "
            f"opening brackets), got {num_values}; put more samples into each shard, or cut the "
            "job into several"
        )


def check_limits(
    posted: JobSpec | CotangentGradientSpec, *, caller: TokenInfo, settings: Settings
) -> None:
    """Check what a job asks for itself.

    Raises:
        OwnerOnly: it wants to go before others' jobs.
        InvalidJob: it wants more time than this box gives a job; the default is cut to that.
    """
    if posted.priority > 0 and not caller.admin:
        raise OwnerOnly(
            f"priority: expected -10 to 0, got {posted.priority}; only the box's owner may let a "
            "job go before those of others: leave it out, or use the owner's token"
        )
    if DEFAULT_TIMEOUT_S != posted.timeout_s > settings.max_timeout_s:
        raise InvalidJob(
            f"timeout_s: expected at most {settings.max_timeout_s:g}, which is this box's limit, "
            f"got {posted.timeout_s:g}; cut the job into several, or ask the box's owner"
        )


def check_queue(num_active: int, *, settings: Settings) -> None:
    """Check that one more job of this owner may wait.

    Posts at the same moment may exceed the limit by their number.

    Args:
        num_active: how many of theirs wait or run.

    Raises:
        QueueFull: as many wait or run as may.
    """
    if num_active >= settings.max_queued_jobs:
        raise QueueFull(
            f"{num_active} of your jobs wait or run, and at most {settings.max_queued_jobs} may on "
            "this box: wait until some have ended, or cancel some (`gradbox jobs cancel ID`)"
        )
