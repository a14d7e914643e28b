"""`python -m gradbox_worker` is `gradbox worker`."""

from __future__ import annotations

import argparse
import sys

from gradbox_worker.command import add_arguments, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gradbox_worker", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
