"""Per-sample results where no torch is installed: NumPy arrays, or what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from gradbox import GradResult, Jacobian
from tests.boxes import TestBox

READ = """
import sys
sys.modules["torch"] = None          # as where torch is not installed
import numpy as np
from gradbox import GradResult, InvalidJob
reduced, factored = map(GradResult.load, sys.argv[1:3])
np.save(sys.argv[3], reduced.gram_trace())
for read in (lambda: factored.grads["0.weight"], factored.flat, factored.numpy, factored.norms):
    try:
        read()
    except InvalidJob as error:
        assert "gradbox[torch]" in str(error), error
    else:
        raise SystemExit("multiplied factors without torch")
"""


def test_what_numpy_can_do_is_done_and_the_rest_says_what_to_install(
    twin: TestBox, tmp_path: Path
) -> None:
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reduced, factored, trace = (tmp_path / name for name in ("gram", "factored", "trace.npy"))
    with twin.client() as client:
        for path, given in ((reduced, {"reduce": "gram"}), (factored, {"form": "factored"})):
            client.run(Jacobian(model="mlp", inputs=[x], **given)).save(path)
    subprocess.run([sys.executable, "-c", READ, reduced, factored, trace], check=True, timeout=500)
    expected = GradResult.load(reduced).gram_trace()
    np.testing.assert_allclose(np.load(trace), expected.numpy(), rtol=1e-12)
