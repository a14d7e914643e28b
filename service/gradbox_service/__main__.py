"""`python -m gradbox_service` is `gradbox service`."""

from __future__ import annotations

import sys

from gradbox.cli.exits import run_alone
from gradbox_service.commands.service import register

if __name__ == "__main__":
    sys.exit(run_alone(register, ["service", *sys.argv[1:]]))
