"""OpenTelemetry spans of a job, where an OTLP endpoint is set; nothing is imported where none is.

A job is one trace through all processes that have a hand in it:

    submit                    client: all that `client.submit` sends
    ├── upload                client: blobs that the box does not have
    ├── accept                service: the posted job is checked and queued
    ├── queue wait            worker: from then until a worker begins the job
    ├── turn                  worker: one attempt at it
    │   └── model load, read inputs, first pass, cotangents, replay, samples, write result
    └── download              client

The identity of `submit` is what the others name as their parent. It travels as W3C `traceparent`: a
header of the posted job, a field of its record and of its view.

The endpoint is OTEL_EXPORTER_OTLP_ENDPOINT, or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT for spans alone;
the exporter speaks OTLP over HTTP with protobuf and takes all else from OTEL_ variables too. Where
the process has a TracerProvider of its own, spans go to that one.

Source: https://www.w3.org/TR/trace-context/ for the header.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer, TracerProvider

log = logging.getLogger(__name__)

HEADER: Final = "traceparent"
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# Version 00; a trace or a span whose number is 0 is none.
TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# A collector that does not answer keeps a process that ends for no longer than this.
EXPORT_TIMEOUT_S: Final = 3.0

Attribute = str | int | float | bool


@dataclass(frozen=True)
class Span:
    """A span that is open, or what stands for one where none is recorded."""

    traceparent: str | None = None
    otel: OtelSpan | None = None

    def note(self, **attributes: Attribute) -> None:
        """Add attributes."""
        if self.otel is not None:
            self.otel.set_attributes(_named(attributes))

    def fail(self, reason: str) -> None:
        """Mark the span as one of work that failed."""
        if self.otel is not None:
            from opentelemetry.trace import StatusCode

            self.otel.set_status(StatusCode.ERROR, reason)


@dataclass(frozen=True)
class Spans:
    """Records the spans of one kind of process, which they name as their service."""

    service: str

    @contextmanager
    def span(
        self, name: str, *, parent: str | None = None, **attributes: Attribute
    ) -> Iterator[Span]:
        """Record a span as long as the context lasts; an exception that leaves it is its error.

        Args:
            parent: a traceparent; None is the span that is open here, or a trace of its own.
        """
        tracer = self._tracer()
        if tracer is None:
            yield Span()
            return
        with tracer.start_as_current_span(
            name, context=_context(parent), attributes=_named(attributes)
        ) as otel:
            yield Span(_traceparent(otel), otel)

    def record(
        self,
        name: str,
        *,
        parent: str | None,
        began_s: float,
        ended_s: float,
        **attributes: Attribute,
    ) -> None:
        """Record a span of the past; nothing where there is no parent.

        Args:
            began_s: in seconds since 1970, as `ended_s`.
        """
        tracer = None if parent is None else self._tracer()
        if tracer is None:
            return
        span = tracer.start_span(
            name,
            context=_context(parent),
            attributes=_named(attributes),
            start_time=int(began_s * 1e9),
        )
        span.end(end_time=int(max(began_s, ended_s) * 1e9))

    def _tracer(self) -> Tracer | None:
        if not enabled():
            return None
        provider = _provider(self.service)
        return None if provider is None else provider.get_tracer("gradbox")


CLIENT: Final = Spans("gradbox-client")


def enabled() -> bool:
    """Tell whether spans are recorded in this process."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not off and any(os.environ.get(name) for name in ENDPOINTS)


def read_traceparent(header: str | None) -> str | None:
    """Return a traceparent that was received; None if it is none, as if it had not been sent."""
    return header if header is not None and TRACEPARENT.fullmatch(header) else None


def trace_headers(traceparent: str | None) -> dict[str, str]:
    """Return the headers that carry a traceparent."""
    return {} if traceparent is None else {HEADER: traceparent}


def _provider(service: str) -> TracerProvider | None:
    """Return the process's own provider if it has one, else ours; None without the packages."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ModuleNotFoundError as error:
        _complain(str(error.name))
        return None
    given = trace.get_tracer_provider()
    return given if isinstance(given, TracerProvider) else _our_provider(service)


@cache
def _our_provider(service: str) -> TracerProvider | None:
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        _complain(str(error.name))
        return None
    attributes = {SERVICE_VERSION: metadata.version("gradbox")}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        attributes[SERVICE_NAME] = service
    given = "OTEL_EXPORTER_OTLP_TIMEOUT" in os.environ
    exporter = OTLPSpanExporter(timeout=None if given else EXPORT_TIMEOUT_S)
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


@cache
def _complain(module: str) -> None:
    log.warning(
        "%s is set, but %s is not installed, so no spans are recorded: pip install "
        "'gradbox[tracing]'",
        next(name for name in ENDPOINTS if os.environ.get(name)),
        module,
    )


def _context(parent: str | None) -> Context | None:
    """Return what a span is begun in; None is the context that is current here."""
    if parent is None:
        return None
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({HEADER: parent}, context=Context())


def _traceparent(span: OtelSpan) -> str | None:
    """Return a span's identity; None for one that records nothing."""
    found = span.get_span_context()
    if not found.is_valid:
        return None
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Any]:
    return {f"gradbox.{name}": value for name, value in attributes.items()}
