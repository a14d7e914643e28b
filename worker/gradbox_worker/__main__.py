"""`python -m gradbox_worker` is `gradbox worker`."""

from __future__ import annotations

import sys

from gradbox.cli.exits import run_alone
from gradbox_worker.command import register

if __name__ == "__main__":
    sys.exit(run_alone(register, ["worker", *sys.argv[1:]]))
