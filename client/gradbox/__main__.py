"""`python -m gradbox` is the `gradbox` command."""

import sys

from gradbox.cli import main

if __name__ == "__main__":
    sys.exit(main())
