"""What `import gradbox` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gradbox


@pytest.mark.parametrize("name", gradbox.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(gradbox, name) is not None


def test_every_error_of_the_tree_is_public() -> None:
    pending = [gradbox.GradboxError]
    while pending:
        error = pending.pop()
        pending += [e for e in error.__subclasses__() if e.__module__ == "gradbox.errors"]
        assert error.__name__ in gradbox.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        gradbox.no_such_name  # noqa: B018


def test_submitting_arrays_needs_no_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None          # as where torch is not installed
import numpy as np
from gradbox import Builtin, GradClient, Gradient
labels = np.arange(4)
shards = [np.ones((2, 3), np.float32)] * 2
prepared = Gradient(
    model="m", inputs=shards, loss=Builtin("cross_entropy"), loss_inputs={"labels": labels}
).prepare()
assert len(prepared.blobs) == 2, prepared
assert GradClient("http://127.0.0.1:1", "token")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_torch_a_function_says_what_to_install() -> None:
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from gradbox import Gradient, InvalidJob
try:
    Gradient(model="m", inputs=[np.ones(3)], loss=lambda z: z.sum()).prepare()
except InvalidJob as error:
    assert "gradbox[torch]" in str(error), error
else:
    raise SystemExit("traced without torch")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_is_quick_because_it_loads_only_the_errors() -> None:
    code = "import sys, gradbox; print(sorted(m for m in sys.modules if m.startswith('gradbox')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['gradbox', 'gradbox.errors', 'gradbox.printable']"
