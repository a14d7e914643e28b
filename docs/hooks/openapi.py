"""Puts the HTTP reference, made from the service's OpenAPI document, where a page asks for it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client"), str(ROOT / "service")]

MARKER = "<!-- openapi -->"
Schema = dict[str, Any]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marker by all routes and schemas."""
    if MARKER not in markdown:
        return markdown
    return markdown.replace(MARKER, "\n".join(lines(document())))


def document() -> Schema:
    """Return the OpenAPI document of a service, which connects to nothing before it is started."""
    from gradbox_service.http.app import create_app
    from gradbox_service.settings import Settings

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data=Path(folder), redis_url="redis://127.0.0.1")
        found: Schema = create_app(settings).openapi()
    return found


def lines(api: Schema) -> Iterator[str]:
    """Return the page's lines: calls by path, then schemas by name."""
    yield "## Calls"
    for path, calls in sorted(api["paths"].items()):
        for verb, call in calls.items():
            yield from _call(verb.upper(), path, call)
    yield "\n## Schemas"
    for name, schema in sorted(api["components"]["schemas"].items()):
        yield f"\n### {name}\n"
        yield _text(schema)
        yield from _fields(schema)


def _call(verb: str, path: str, call: Schema) -> Iterator[str]:
    yield f"\n### `{verb} {path}`\n"
    yield call.get("description") or call.get("summary", "")
    given = call.get("parameters", [])
    if given:
        yield "\n| parameter | in | type | |\n|---|---|---|---|"
    for parameter in given:
        kind = _type(parameter["schema"])
        yield f"| `{parameter['name']}` | {parameter['in']} | {kind} | {_text(parameter)} |"
    for media, content in call.get("requestBody", {}).get("content", {}).items():
        yield f"\nBody, `{media}`: {_type(content.get('schema', {}))}"
    for status, answer in call["responses"].items():
        kinds = [_type(content.get("schema", {})) for content in answer.get("content", {}).values()]
        if not status.endswith("XX"):
            yield f"\n{status}: {' or '.join(kinds) or 'no body'}"


def _fields(schema: Schema) -> Iterator[str]:
    properties = schema.get("properties", {})
    if properties:
        yield "\n| field | type | default | |\n|---|---|---|---|"
    for name, field in properties.items():
        default = "required" if name in schema.get("required", []) else f"`{field.get('default')}`"
        yield f"| `{name}` | {_type(field)} | {default} | {_text(field)} |"
    if not properties:
        yield f"\n{_type(schema)}"


def _type(schema: Schema) -> str:
    """Return a schema in a few words, with links to those that have a name."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_type(one) for one in schema[several])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type(schema['additionalProperties'])}"
    return str(schema.get("type", "any"))


def _text(schema: Schema) -> str:
    """Return a description as one line of Markdown that fits a table."""
    return " ".join(str(schema.get("description", "")).split()).replace("|", "\\|")
