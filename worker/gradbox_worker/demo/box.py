"""A box of one's own for a while: what `gradbox up` starts, by default with all-MiniLM-L6-v2."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gradbox_worker.demo.task import MODEL, model_folder

READY = "gradbox ready at "


@contextmanager
def running_box(
    folder: Path,
    *,
    registered: str | None = None,
    device: str = "cpu",
    arguments: Sequence[str] = (),
) -> Iterator[tuple[str, str]]:
    """Run `gradbox up` in `folder` and give its URL and token; stop it whatever happens.

    Args:
        registered: the text of a models file, in place of the demo's.
        arguments: of `gradbox up`, beside those that are needed.
    """
    models = folder / "models.toml"
    models.write_text(
        registered
        or f'[models.{MODEL}]\nbuilder = "hf"\nsource = {json.dumps(str(model_folder()))}\n'
    )
    command = [sys.executable, "-m", "gradbox", "up", "--port", "0", "--models", str(models)]
    command += ["--device", device, "--data", str(folder / "data"), *arguments]
    if "--cluster" not in arguments:
        command += ["--workers", "1"]
    # A group of its own: Ctrl-C comes here first, and the box is stopped in order.
    up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert up.stdout is not None
        for line in up.stdout:
            print(line, end="", flush=True)
            if line.startswith(READY):
                break
        else:
            raise SystemExit(f"gradbox up ended with exit code {up.wait()} before it was ready")
        yield _credentials(folder / "data" / "client.toml")
    finally:
        up.terminate()
        up.wait()


def _credentials(path: Path) -> tuple[str, str]:
    entries = tomllib.loads(path.read_text())
    return entries["url"], entries["token"]
