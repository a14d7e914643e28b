"""`gradbox up --wait`: the box runs in the background, and the command returns when it is ready."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gradbox_service.settings import Settings
from gradbox_service.up.box import LOG, READY
from gradbox_service.up.console import say
from gradbox_service.up.processes import Part, ended, of_module

LOOK_S: Final = 0.05
STOP_S: Final = 120.0


def start(arguments: Sequence[str], *, settings: Settings) -> int:
    """Run `gradbox up` with these arguments in the background until it is ready or has ended.

    What it says goes to a log in the data folder, and meanwhile to this command's output.

    Returns:
        0 if jobs can run now, else the exit code of the box.

    Raises:
        BadSettings: the data folder cannot be made or written.
    """
    settings.make_data_folder()
    data = settings.data
    data.chmod(0o700)
    command = of_module("gradbox", "up", *arguments)
    box = Part("the box", command, log=data / "logs" / LOG, with_parent=None)
    box.start()
    try:
        return _until_ready(box, data)
    except KeyboardInterrupt:
        box.stop(within_s=STOP_S)
        raise


def _until_ready(box: Part, data: Path) -> int:
    num_shown = 0
    while True:
        code = box.exit_code()
        lines = box.lines()
        for line in lines[num_shown:]:
            ready = line.startswith(READY)
            print(line, file=sys.stdout if ready else sys.stderr, flush=True)
            if ready:
                print(f"gradbox up: to stop it: gradbox down --data {data}", file=sys.stderr)
                return 0
        num_shown = len(lines)
        if code is not None and code < 0:
            say(f"the box {ended(code)} before it was ready; its log is {box.log}")
            return 1
        if code is not None:
            return code
        time.sleep(LOOK_S)
