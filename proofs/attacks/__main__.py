"""`python -m proofs.attacks [--list] [--slow] [NAME ...]`: try attacks on a box made for them."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from proofs.attacks.tables import ATTACKS, Attack
from proofs.attacks.target import NotHere, Target, own_box

MODELS = ("plain", "words")
"""What the box has that all attacks share."""


def main() -> int:
    """Try the attacks, and return 1 if one ended otherwise than the table says."""
    parser = argparse.ArgumentParser(prog="python -m proofs.attacks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a name or a glob; all if none")
    parser.add_argument("--list", action="store_true", help="show what there is, and try nothing")
    parser.add_argument(
        "--slow", action="store_true", help="the slow ones too, where none is named"
    )
    args = parser.parse_args()
    chosen = _chosen(args.names, slow=args.slow)
    if not chosen:
        print(f"no attack goes by {args.names}; see --list", file=sys.stderr)
        return 2
    if args.list:
        for attack in chosen:
            print(_described(attack))
        return 0
    with own_box(models=MODELS) as target:
        ends = [_tried(attack, target) for attack in chosen]
    return 0 if all(ends) else 1


def _chosen(names: Sequence[str], *, slow: bool) -> list[Attack]:
    if not names:
        return [attack for attack in ATTACKS.values() if slow or not attack.slow]
    return [
        attack
        for attack in ATTACKS.values()
        if any(attack.name == name or fnmatchcase(attack.name, name) for name in names)
    ]


def _described(attack: Attack) -> str:
    lines = [attack.name, f"    tries  {attack.tries}", f"    must   {attack.must}"]
    if attack.open is not None:
        lines.append(f"    OPEN   {attack.open}")
    return "\n".join([*lines, "    slow"] if attack.slow else lines)


def _tried(attack: Attack, target: Target) -> bool:
    """Try an attack and print how it ended; False if that is not as the table says."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradbox-attack-") as folder:
        target.folder = Path(folder)
        try:
            attack.run(target)
        except AssertionError as error:
            said, as_told = ("open" if attack.open else "FAILED"), attack.open is not None
            why = f": {error}" if not attack.open else f": {attack.open} ({error})"
        except NotHere as error:
            said, as_told, why = "skipped", True, f": {error}"
        except Exception as error:  # noqa: BLE001  # the other attacks are still to be tried
            said, as_told, why = "BROKEN", False, f": {type(error).__name__}: {error}"
        else:
            said, as_told = ("held", True) if attack.open is None else ("HELD, said open", False)
            why = ""
    print(f"{said:16}{time.monotonic() - begin:6.1f} s  {attack.name}{why}"[:400], flush=True)
    return as_told


if __name__ == "__main__":
    sys.exit(main())
