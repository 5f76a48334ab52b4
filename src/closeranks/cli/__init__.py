"""The command line: `closeranks run | demo | bench | doctor`. Parses, then calls one function.

A module for each command. Imports what a command needs when it is asked for, and never torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from closeranks.cli.bench import add_bench
from closeranks.cli.demo import add_demo
from closeranks.cli.doctor import add_doctor
from closeranks.cli.parser import Parser
from closeranks.cli.run import add_run

_BAD_INPUT = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    try:
        values, unknown = parser.parse_known_args(given)
        if unknown:
            shown = f"closeranks {values.which} --help" if values.which else "closeranks --help"
            raise ValueError(f"{unknown[0]}: no such option (`{shown}` shows what there is)")
        return int(values.call(values))
    except ValueError as error:
        sys.stderr.write(f"closeranks: {error}\n")
        return _BAD_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED


def make_parser() -> Parser:
    parser = Parser(
        prog="closeranks",
        description="Run, watch and measure data-parallel training with PyTorch.",
    )
    parser.set_defaults(call=lambda values: _show_help(parser))
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="which", parser_class=Parser
    )
    for add in (add_run, add_demo, add_bench, add_doctor):
        add(commands)
    return parser


def _show_help(parser: Parser) -> int:
    sys.stdout.write(parser.format_help())
    return 0
