"""`gradbox up --wait`: the box runs in the background, and the command returns when it is ready."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gradbox_service.settings import Settings
from gradbox_service.up.box import LOG, READY
from gradbox_service.up.console import say
from gradbox_service.up.processes import ended, rotate

LOOK_S: Final = 0.05


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
    folder = data / "logs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    data.chmod(0o700)
    rotate(folder / LOG)  # now, for what follows is read from where it begins
    descriptor = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        begin = os.lseek(descriptor, 0, os.SEEK_END)
        box = subprocess.Popen(
            [sys.executable, "-m", "gradbox", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    try:
        return _until_ready(box, folder / LOG, begin=begin, data=data)
    except KeyboardInterrupt:
        box.terminate()
        box.wait()
        raise


def _until_ready(box: subprocess.Popen[bytes], log: Path, *, begin: int, data: Path) -> int:
    with log.open() as file:
        file.seek(begin)
        while True:
            code = box.poll()
            for line in file:
                ready = line.startswith(READY)
                print(line, end="", file=sys.stdout if ready else sys.stderr, flush=True)
                if ready:
                    print(f"gradbox up: to stop it: gradbox down --data {data}", file=sys.stderr)
                    return 0
            if code is not None and code < 0:
                say(f"the box {ended(code)} before it was ready; its log is {log}")
                return 1
            if code is not None:
                return code
            time.sleep(LOOK_S)
