"""What /openapi.json says beyond what FastAPI sees: what the routes read by themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gradbox.protocol import JOB_SPEC, CotangentGradientSpec, Problem, ProgressView

REFERENCE = "#/components/schemas/{model}"
POSTED = {
    "anyOf": [
        {"$ref": "#/components/schemas/JobSpec"},
        {"$ref": "#/components/schemas/CotangentGradientSpec"},
    ]
}
MAX_KEY_LENGTH = 200
JOB_REQUEST: dict[str, Any] = {
    "parameters": [
        {
            "name": "idempotency-key",
            "in": "header",
            "required": False,
            "description": "Makes posting repeatable",
            "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH},
        },
        {
            "name": "traceparent",
            "in": "header",
            "required": False,
            "description": "W3C Trace Context: the parent of the job's spans",
            "schema": {"type": "string"},
        },
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": POSTED},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["job"],
                    "properties": {"job": POSTED},
                    "additionalProperties": {"type": "string", "format": "binary"},
                }
            },
        },
    },
}
BLOB_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
PROBLEM: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "A problem that the caller can solve",
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
        },
    },
    "5XX": {
        "description": "A problem of the box; Retry-After says when waiting helps",
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
        },
    },
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of the app."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, schemas = models_json_schema(
        [
            (CotangentGradientSpec, "validation"),
            (Problem, "serialization"),
            (ProgressView, "serialization"),
        ],
        ref_template=REFERENCE,
    )
    job = JOB_SPEC.json_schema(ref_template=REFERENCE)
    document["components"]["schemas"] |= schemas["$defs"] | job.pop("$defs") | {"JobSpec": job}
    return document
