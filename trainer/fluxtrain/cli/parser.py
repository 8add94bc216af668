"""The parser of the command line, whose errors are one line, and the types of numbers."""

from __future__ import annotations

import argparse
from typing import NoReturn

from fluxtrain.errors import EXIT_USAGE, one_line


class Parser(argparse.ArgumentParser):
    """A parser whose errors look like those of the commands; so do those of its subparsers."""

    def error(self, message: str) -> NoReturn:
        """Print in one line what is wrong, and exit."""
        of_argument = message.removeprefix("argument ")
        help = "" if of_argument != message else f"; see {self.prog} --help"
        self.exit(EXIT_USAGE, f"fluxtrain: error: {one_line(of_argument)}{help}\n")


def whole_number(text: str) -> int:
    """Return ``text`` as a whole number; ArgumentTypeError if it is none."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; must be a whole number") from None


def number(text: str) -> float:
    """Return ``text`` as a number; ArgumentTypeError if it is none."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; must be a number") from None
