"""`closeranks doctor`: what is wrong with this machine."""

from __future__ import annotations

import argparse

from closeranks.cli.parser import Commands


def add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="look for what would make jobs on this machine fail or slow",
        description="Look at cores, threads, memory, torch, kernels, interfaces and limits. Each "
        "is ok, a warning or an error, with the remedy. The exit code is 1 if there is an error.",
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(call=_doctor)


def _doctor(values: argparse.Namespace) -> int:
    from closeranks.doctor.report import doctor

    return doctor(values.json)
