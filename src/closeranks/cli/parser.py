"""How all commands read their words: one clear line for what is wrong, and torchrun's spellings."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]
else:
    Commands = argparse._SubParsersAction


class Parser(argparse.ArgumentParser):
    """One clear line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument [^:]+: (?!invalid|expected|not allowed)", "", message)
        raise ValueError(f"{message} (`{self.prog} --help` shows what there is)")


def add_option(group: argparse._ArgumentGroup, *names: str, **options: Any) -> None:
    """An option, also understood when it is spelled with _ as torchrun allows."""
    kept = group.add_argument(*names, **options)
    spellings = ["--" + name[2:].replace("-", "_") for name in names if "-" in name[2:]]
    if spellings:
        hidden = {"dest": kept.dest, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        group.add_argument(*spellings, **(options | hidden))


def value_of(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of values whose own words reach the user."""

    def parse_or_explain(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_or_explain
