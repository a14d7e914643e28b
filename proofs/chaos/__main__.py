"""`python -m proofs.chaos`: run a box under faults, and say whether it held."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from proofs.chaos.report import as_json, misses, text
from proofs.chaos.run import Plan, run


def main() -> int:
    """Run, print the table, and return 0 if every invariant and every bar held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m proofs.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (5)")
    parser.add_argument("--seed", type=int, help="of all that is drawn (random, and printed)")
    parser.add_argument("--workers", type=int, default=2, help="how many workers (2)")
    parser.add_argument("--report", type=Path, help="a file for the report as JSON")
    parser.add_argument("--no-whole-box", action="store_true", help="never kill the whole box")
    parser.add_argument("--no-full-disk", action="store_true", help="never fill the disk")
    parser.add_argument("--verbose", action="store_true", help="print every fault")
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f"gradbox chaos: --minutes {args.minutes:g} --seed {seed}", flush=True)
    outcome = run(
        Plan(
            minutes=args.minutes,
            seed=seed,
            num_workers=args.workers,
            whole_box=not args.no_whole_box,
            full_disk=not args.no_full_disk,
            verbose=args.verbose,
        )
    )
    print(text(outcome))
    if args.report is not None:
        args.report.write_text(json.dumps(as_json(outcome), indent=1) + "\n")
    return 1 if misses(outcome) else 0


if __name__ == "__main__":
    sys.exit(main())
