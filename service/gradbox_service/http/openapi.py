"""What /openapi.json says beyond what FastAPI sees: what the routes read by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gradbox.protocol import (
    JOB_AND_RESULT,
    JOB_SPEC,
    CotangentGradientSpec,
    CotangentStepSpec,
    JobView,
    Problem,
    ProgressView,
    RunSpec,
    SaveOrder,
    StoreSpec,
)

Described = dict[str, Any]
REFERENCE = "#/components/schemas/{model}"
MAX_KEY_LENGTH = 200
TEXT: Described = {"type": "string"}
BINARY: Described = {"schema": {"type": "string", "format": "binary"}}


def sent(name: str, description: str, schema: Described = TEXT) -> Described:
    """Describe a header that a request may have and that its route reads by itself."""
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": schema,
    }


def header(description: str, schema: Described = TEXT) -> Described:
    """Describe a header of an answer."""
    return {"description": description, "schema": schema}


PREFER = sent("prefer", "`wait=N`: answer at the job's end, or after N seconds")
# What an answer about a job is beside the job's JSON, for `responses` of its route.
JOB_ANSWER: Described = {
    "content": {
        "application/json": {"schema": {"$ref": "#/components/schemas/JobView"}},
        JOB_AND_RESULT: BINARY,
    },
    "headers": {"Preference-Applied": header("`wait=N`, where the job's end was waited for")},
}

SPEC_ANSWER: Described = {"content": {"application/json": {}, "text/plain": {"schema": TEXT}}}


IDEMPOTENCY_KEY = sent(
    "idempotency-key",
    "Makes posting repeatable",
    {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH},
)
TRACEPARENT = sent("traceparent", "W3C Trace Context: the parent of the job's spans")


def any_of(*models: str) -> Described:
    """Describe a body that is one of these."""
    return {"anyOf": [{"$ref": REFERENCE.format(model=model)} for model in models]}


def with_blobs(job: Described) -> Described:
    """Describe the body of a request that posts a job, alone or with its blobs."""
    form = {
        "type": "object",
        "required": ["job"],
        "properties": {"job": job},
        "additionalProperties": {"type": "string", "format": "binary"},
    }
    content = {"application/json": {"schema": job}, "multipart/form-data": {"schema": form}}
    return {"required": True, "content": content}


def json_body(model: str) -> Described:
    """Describe a body of JSON."""
    schema = {"$ref": REFERENCE.format(model=model)}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def posts_a_job(body: Described, *, ended: str, parameters: Sequence[Described] = ()) -> Described:
    """Describe a route that posts a job; `ended` is said of one that has ended within the wait."""
    return {
        "status_code": 202,
        "response_model": JobView,
        "responses": {
            200: {"model": JobView, "description": ended, **JOB_ANSWER},
            202: JOB_ANSWER,
        },
        "openapi_extra": {"parameters": [*parameters, TRACEPARENT, PREFER], "requestBody": body},
    }


RUN_REQUEST: Described = {
    "parameters": [IDEMPOTENCY_KEY],
    "requestBody": json_body("RunSpec"),
}
STORE_REQUEST: Described = {"requestBody": json_body("StoreSpec")}
RESULT_REQUEST: Described = {
    "parameters": [
        sent(
            "range",
            "`bytes=0-99`, `bytes=100-`, `bytes=-100`; other units and several at once are ignored",
        ),
        sent("if-range", "An ETag: all of the file is sent if it has another"),
        sent("if-none-match", "ETags: 304 if the file has one of them"),
    ]
}
_ETAG = {"ETag": header("The SHA-256 of the whole file, in quotes")}
RESULT_ANSWERS: dict[int | str, Described] = {
    200: {
        "description": "The safetensors file",
        "content": {"application/octet-stream": BINARY},
        "headers": _ETAG
        | {"Accept-Ranges": header("`bytes`"), "Last-Modified": header("When the job ended")},
    },
    206: {
        "description": "The range",
        "content": {"application/octet-stream": BINARY},
        "headers": _ETAG | {"Content-Range": header("Which bytes of how many")},
    },
    304: {"description": "The file has an ETag of If-None-Match", "headers": _ETAG},
}
BLOB_BODY: Described = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": BINARY},
    }
}
_PROBLEM_CONTENT = {
    "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
}
_RETRY_AFTER = {"Retry-After": header("Seconds; where waiting helps", {"type": "integer"})}
PROBLEM: dict[int | str, Described] = {
    "4XX": {
        "description": "A problem that the caller can solve",
        "content": _PROBLEM_CONTENT,
        "headers": _RETRY_AFTER,
    },
    "5XX": {
        "description": "A problem of the box; Retry-After says when waiting helps",
        "content": _PROBLEM_CONTENT,
        "headers": _RETRY_AFTER,
    },
}
# Of logging in and out: no page of another site can send it.
DASHBOARD_REQUEST: Described = {
    "parameters": [
        {**sent("x-gradbox-dashboard", "Any text; 403 without it"), "required": True},
    ]
}
BEARER = "HTTPBearer"
SESSION = "Session"
SESSION_COOKIE: Described = {
    "type": "apiKey",
    "in": "cookie",
    "name": "gradbox-8642",
    "description": "What `POST /v1/session` sets, by the port of the URL: `gradbox-https` or "
    "`gradbox-http` where it names none. All but GET wants the header X-Gradbox-Dashboard with it.",
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of the app."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, schemas = models_json_schema(
        [
            (CotangentGradientSpec, "validation"),
            (CotangentStepSpec, "validation"),
            (RunSpec, "validation"),
            (SaveOrder, "validation"),
            (StoreSpec, "validation"),
            (Problem, "serialization"),
            (ProgressView, "serialization"),
        ],
        ref_template=REFERENCE,
    )
    job = JOB_SPEC.json_schema(ref_template=REFERENCE)
    document["components"]["schemas"] |= schemas["$defs"] | job.pop("$defs") | {"JobSpec": job}
    document["components"]["securitySchemes"][SESSION] = SESSION_COOKIE
    for calls in document["paths"].values():
        for call in calls.values():
            if {BEARER: []} in call.get("security", []):
                call["security"].append({SESSION: []})
    return document
