"""`python -m gradbox_service` is `gradbox service`."""

from __future__ import annotations

import argparse
import sys

from gradbox_service.commands import register_service


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gradbox_service")
    register_service(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args(["service", *sys.argv[1:]])
    return int(args.func(args))


if __name__ == "__main__":
    sys.exit(main())
