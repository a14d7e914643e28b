"""HTTP with one box: the bearer token, retries, and problems turned into errors.

What is transient is tried again with growing pauses until `Retry.patience_s` is over: a broken
connection, and the statuses 429, 502, 503 and 504, after `Retry-After` where it is given; a full
disk (507) only where it is. A longer wait is logged. Every call can be repeated: uploads are named
by their content, jobs by an idempotency key. A refused connection is only waited for where the box
has answered before (it restarts); at first contact it means that nothing listens there.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, NoReturn, TypeVar, cast

import httpx
from pydantic import BaseModel, ValidationError

from gradbox.errors import GradboxError, InvalidInputs, ProtocolError, ServiceUnavailable
from gradbox.http.http_client import http_client
from gradbox.printable import printable
from gradbox.protocol import Problem
from gradbox.settings import ClientSettings

log = logging.getLogger(__name__)

TRANSIENT: Final = frozenset({429, 502, 503, 504})
LOGIN_PAGES: Final = frozenset({200, 401, 403})
PROBLEM: Final = "application/problem+json"
CONNECT_TIMEOUT_S: Final = 10.0
# A call that waits as long says why, by a warning that Python shows unless told otherwise.
SILENT_S: Final = 1.0
CLOSED: Final = "expected an open client, got one that was closed; make another"

Parsed = TypeVar("Parsed", bound=BaseModel)
Body = Callable[[], Iterable[bytes | memoryview]]


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How long a request is repeated after transient faults, and how the pauses grow.

    Args:
        patience_s: seconds from the first fault since the last progress; 0 repeats nothing.
        first_pause_s: seconds before the first repetition; each later pause is twice as long.
        longest_pause_s: seconds at which pauses stop growing. `Retry-After` may ask for longer.
    """

    patience_s: float = 30.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0


class Backoff:
    """The pauses between the requests of one call: `pause` waits before the next, or gives up.

    Our own, not tenacity or stamina: both count patience from the call's start, whereas here it
    counts from the first fault since the last progress, so a long download has it whole.
    """

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self.reset()

    def reset(self) -> None:
        """Start again with the first pause and all patience: there was progress."""
        self._number = 0
        self._since_s: float | None = None  # the first fault
        self._logged = False

    def pause(self, fault: TransientFault) -> None:
        """Wait before the next request; log why, once, where that takes longer.

        Raises:
            ServiceUnavailable: patience is over, or waiting cannot help.
        """
        now = time.monotonic()
        if self._since_s is None:
            self._since_s = now
        left_s = self._since_s + self._retry.patience_s - now
        grown = self._retry.first_pause_s * 2**self._number * random.uniform(0.75, 1.25)
        pause_s = max(min(grown, self._retry.longest_pause_s), fault.retry_after_s)
        self._number += 1
        if fault.refused or pause_s > left_s:
            raise fault.error from fault.__cause__
        if not self._logged and now + pause_s - self._since_s >= SILENT_S:
            self._logged = True
            log.warning("%s; trying again for up to %.0f s", printable(str(fault)), left_s)
        time.sleep(pause_s)


class TransientFault(Exception):
    """A request failed in a way that its repetition may not.

    Attributes:
        error: what to raise when patience is over.
        retry_after_s: how long the box asks to wait.
        refused: whether waiting cannot help, because nothing listens there.
    """

    def __init__(
        self,
        error: ServiceUnavailable | str,
        *,
        retry_after_s: float = 0.0,
        refused: bool = False,
    ) -> None:
        super().__init__(str(error))
        self.error = ServiceUnavailable(error) if isinstance(error, str) else error
        self.retry_after_s = retry_after_s
        self.refused = refused


class Connection:
    """One box over HTTP. Threads may share one, and so may processes that are forked off."""

    def __init__(
        self,
        settings: ClientSettings,
        *,
        transport: httpx.BaseTransport | None = None,
        timeout_s: float = 60.0,
        retry: Retry | None = None,
    ) -> None:
        self.url = settings.url
        self._found = f", which {settings.source} names" if settings.source else ""
        self._timeout_s = timeout_s
        self._retry = retry or Retry()
        self._answered = False
        # To parse a path and join it with a base is a third of what httpx does for a request, and
        # most requests go to few paths.
        self._address = lru_cache(lambda path: httpx.URL(f"{settings.url}{path}"))
        self._open = partial(http_client, settings, transport)
        self._http, self._process = self._open(), os.getpid()

    def __reduce__(self) -> NoReturn:
        raise InvalidInputs(
            "expected a client to stay in its process, got it, or a job of it, to be pickled or "
            "copied: make another there by GradClient(), and the job's handle by client.job(ID)"
        )

    def close(self) -> None:
        self._http.close()

    def backoff(self) -> Backoff:
        return Backoff(self._retry)

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
        accept: Container[int] = (),
        wait_s: int = 0,
    ) -> httpx.Response:
        """Send a request until it is answered, and return the answer with its body.

        Args:
            body: gives the body's pieces; called each time the request is sent.
            accept: error statuses to return instead of raising.
            wait_s: how long the box may take to answer, beside what any answer takes; it is told
                so (`Prefer: wait`, RFC 7240).

        Raises:
            GradboxError: what the box answered, as the class that the problem names.
            ServiceUnavailable: it could not be reached within the patience of `Retry`.
            ProtocolError: what answered is no gradbox service.
        """
        backoff = self.backoff()
        if wait_s:
            headers = {**(headers or {}), "Prefer": f"wait={wait_s}"}
        timeout_s = self._timeout_s + wait_s
        while True:
            try:
                with self.stream(
                    method, path, body=body, headers=headers, accept=accept, timeout_s=timeout_s
                ) as answer:
                    answer.read()
                    return answer
            except TransientFault as fault:
                backoff.pause(fault)

    def ask(
        self,
        kind: type[Parsed],
        method: str,
        path: str,
        sent: BaseModel | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Parsed:
        """Send a request whose body is the JSON of `sent`, and read the JSON of its answer.

        Raises:
            GradboxError: as for `request` and `parsed`.
        """
        if sent is None:
            return parsed(kind, self.request(method, path, headers=headers))
        body = sent.model_dump_json().encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        return parsed(kind, self.request(method, path, body=lambda: [body], headers=headers))

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
        accept: Container[int] = (),
        timeout_s: float | None = None,
    ) -> Iterator[httpx.Response]:
        """Send a request once and give the answer before its body is read.

        Raises:
            TransientFault: also from within the context, when the connection breaks there.
            GradboxError, ProtocolError: as for `request`.
        """
        # Whoever waits for an answer no longer than this waits no longer for a connection.
        connect_s = min(CONNECT_TIMEOUT_S, self._timeout_s)
        timeout = httpx.Timeout(timeout_s or self._timeout_s, connect=connect_s)
        if self._http.is_closed:
            raise ServiceUnavailable(CLOSED)
        if self._process != os.getpid():
            # Forked off with its parent's sockets, on which each would read the other's answers.
            self._http, self._process = self._open(), os.getpid()
        try:
            # httpx sends any buffer; its annotations say bytes.
            content = cast("Iterable[bytes] | None", body and body())
            with self._http.stream(
                method, self._address(path), content=content, headers=headers, timeout=timeout
            ) as answer:
                self._answered = True
                if not (answer.is_success or answer.status_code in accept):
                    answer.read()
                    raise _refusal(answer)
                yield answer
        except httpx.ConnectError as error:
            raise TransientFault(
                f"expected a gradbox service at {self.url}{self._found}, but cannot connect "
                f"({error}); {_advice(error)}",
                refused=not self._answered,
            ) from error
        except httpx.TransportError as error:
            raise TransientFault(
                f"the connection to {self.url} broke ({type(error).__name__}: {error}); try again, "
                f"and if it persists ask the box's owner to look at the service's log"
            ) from error


def parsed(model: type[Parsed], answer: httpx.Response) -> Parsed:
    """Read an answer's JSON.

    Raises:
        ProtocolError: it has another form.
    """
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        raise ProtocolError(
            f"expected a {model.__name__} from {answer.request.url}, got {answer.text[:200]!r} "
            f"({error.error_count()} fields differ); "
            f"{_sent_by_a_proxy(answer) or 'is this client older or newer than the box?'}"
        ) from None


def _advice(error: httpx.ConnectError) -> str:
    """Say what to do about a connection that did not come about."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            "the box's owner renews an expired certificate; SSL_CERT_FILE names the PEM file of an "
            "authority of your own; and the address has to be a name that the certificate has"
        )
    if "[SSL" in str(error):
        return "it does not speak TLS as this client does: is the address http:// instead?"
    return "is it running (`gradbox up`), and is the address right? `gradbox doctor` looks"


def _refusal(answer: httpx.Response) -> GradboxError | TransientFault:
    error = _described(answer)
    if answer.status_code in TRANSIENT or (
        answer.status_code == httpx.codes.INSUFFICIENT_STORAGE and _retry_after_s(answer)
    ):
        known = error if isinstance(error, ServiceUnavailable) else str(error)
        return TransientFault(known, retry_after_s=_retry_after_s(answer))
    return error


def _described(answer: httpx.Response) -> GradboxError:
    media_type = answer.headers.get("content-type", "").partition(";")[0].strip()
    if media_type == PROBLEM:
        try:
            problem = Problem.model_validate_json(answer.content)
        except ValidationError:
            pass  # falls through to what any other answer is
        else:
            error = problem.error()
            if problem.request_id:
                error.add_note(f"request id: {printable(problem.request_id)}")
            return error
    return ProtocolError(
        f"expected an answer of a gradbox service from {answer.request.method} "
        f"{answer.request.url}, got status {answer.status_code} with {media_type or 'no body'}: "
        f"{answer.text[:200]!r}; "
        f"{_sent_by_a_proxy(answer) or 'is this the address of a box, or of something before it?'}"
    )


def _sent_by_a_proxy(answer: httpx.Response) -> str | None:
    """Say what to do about an answer of something before the box; None if it is not known."""
    if answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
        return (
            f"a proxy before the box takes no body of "
            f"{answer.request.headers.get('Content-Length')} bytes: have its limit raised (of "
            f"nginx, client_max_body_size), or reach the box past it (ssh -L)"
        )
    is_page = "html" in answer.headers.get("content-type", "")
    if answer.has_redirect_location or (is_page and answer.status_code in LOGIN_PAGES):
        to = answer.headers.get("location")
        return (
            f"a page for browsers{f', at {to},' if to else ''} answers before the box, most often "
            f"to log in: have it let /v1 through, which has tokens of its own, or reach the box "
            f"past it (ssh -L)"
        )
    return None


def _retry_after_s(answer: httpx.Response) -> float:
    """Return the seconds that the box asks to wait; dates, which it never sends, count as none."""
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0
