"""Code that runs a job once more: Python, the TOML that `gradbox submit` reads, a call of curl.

The box has the tensors of a job by their digests, and its functions as graphs. So code names the
job for these, with a comment for each, and has its plain options as they were, to be changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, Literal

from gradbox.protocol.spec import PostedSpec

CodeForm = Literal["python", "toml", "curl"]

DIGITS: Final = 16
APART: Final = {"protocol", "computation", "estimate", "z"}
# Options that are written even if they are as by default.
OFTEN_CHANGED: Final = ("mode", "seed", "precision")
# A longer value is shown by its digest.
SHOWN_LENGTH: Final = 72
PYTHON: Final = """\
from gradbox import GradClient

with GradClient() as client:
    job = client.again(
        "{job}",
{changes}    )
    result = job.result()
"""
CURL: Final = """\
curl -sf -H "Authorization: Bearer $GRADBOX_TOKEN" "$GRADBOX_URL/v1/jobs/{job}/spec" |
    curl --fail-with-body -H "Authorization: Bearer $GRADBOX_TOKEN" \\
        -H "Content-Type: application/json" --data-binary @- "$GRADBOX_URL/v1/jobs"
"""


def code_of(spec: PostedSpec, form: CodeForm, *, job: str) -> str:
    """Return code that runs a job once more, with comments on what is no plain option of it."""
    given = {
        name: value
        for name, value in spec.model_dump(mode="json", exclude=APART).items()
        if name in OFTEN_CHANGED or value != type(spec).model_fields[name].default
    }
    options = {name: value for name, value in given.items() if _is_plain(value)}
    others = [f"#   {n}: {_described(n, v)}" for n, v in given.items() if n not in options]
    notes = "\n".join([f"# Job {job}, with these of its own on the box:", *others])
    return f"{notes}\n{code_again(job, form, options)}"


def code_again(job: str, form: CodeForm, options: Mapping[str, Any]) -> str:
    """Return code that runs a job once more, in which these options can be changed."""
    # In JSON, text, numbers and lists of text are written as in Python and in TOML.
    written = {name: json.dumps(value, ensure_ascii=False) for name, value in options.items()}
    if form == "curl":
        return CURL.format(job=job)
    if form == "toml":
        lines = {"again": f'"{job}"', **written}.items()
        return "".join(f"{name} = {text}\n" for name, text in lines)
    changes = "".join(f"        {name}={text},\n" for name, text in written.items())
    return PYTHON.format(job=job, changes=changes)


def _is_plain(value: Any) -> bool:
    entries = value if isinstance(value, list) else [value]
    return all(isinstance(entry, str | int | float) for entry in entries)


def _described(name: str, value: Any) -> str:
    text = json.dumps(value)
    if len(text) <= SHOWN_LENGTH:
        return text
    digest = f"SHA-256 {sha256(text.encode()).hexdigest()[:DIGITS]}"
    if name == "inputs":
        return f"{sum(len(group['shards']) for group in value)} shards, {digest}"
    return f"a traced graph, {digest}" if '"graph": ' in text else digest
