"""`gradbox doctor`: all checks, printed."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from gradbox.cli.doctor.box_checks import check_box
from gradbox.cli.doctor.finding import Finding
from gradbox.cli.doctor.machine_checks import check_machine, check_packages
from gradbox.cli.down import DataFolder, data_folder
from gradbox.cli.exits import DONE, JOB_FAILED
from gradbox.cli.output import AsJson, say, say_json, styled

COLOURS: Final = {"ok": "green", "problem": "red", "skipped": "yellow"}

ModelsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="a models file [DATA/models.toml, else ./models.toml]"),
]
Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="what a box is to use: cpu, cuda:0, …")
]


def run(
    *,
    data: DataFolder = None,
    models: ModelsFile = None,
    device: Device = None,
    json: AsJson = False,
) -> int:
    """Print every check; 1 if one of them found a problem."""
    found: list[Finding] = []
    machine = check_machine(data=data_folder(data), models=models, device=device)
    for checks in (check_packages(), check_box(), machine):
        for finding in checks:
            found.append(finding)
            if not json:
                _say(finding)
    if json:
        say_json([asdict(finding) for finding in found], indent=2)
    return JOB_FAILED if any(finding.state == "problem" for finding in found) else DONE


def _say(finding: Finding) -> None:
    state = f"{finding.state:<8}"
    # Coloured after `say` has made the rest printable.
    sys.stdout.write(styled(state, COLOURS[finding.state], stream=sys.stdout))
    first, *more = finding.says.split("\n")
    say(f"{finding.check:<13}{first}")
    for line in more:
        say(f"{'':21}{line}")
    if finding.fix:
        say(f"{'':21}fix: {finding.fix}")
