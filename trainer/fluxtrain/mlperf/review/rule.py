"""A rule of the benchmark's text as code, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Check = Callable[[T], Iterator[str]]


@dataclass(frozen=True)
class Finding:
    """What is wrong, in which run or result, and what to do."""

    rule: str
    section: (
        str  # of MLCommons' training rules; empty for a rule of its submission rules or checkers
    )
    place: str
    text: str
    fix: str


@dataclass(frozen=True)
class Rule(Generic[T]):
    """A named rule for one run or for one result; ``check`` yields a text per finding."""

    name: str
    section: str
    fix: str
    check: Check[T]
    closed_only: bool

    def findings(self, subject: T, place: str, closed: bool) -> Iterator[Finding]:
        """Yield what the rule finds in ``subject``, which is of the closed division or not."""
        if self.closed_only and not closed:
            return
        for text in self.check(subject):
            yield Finding(self.name, self.section, place, text, self.fix)


def rule(
    name: str, section: str, fix: str, closed_only: bool = False
) -> Callable[[Check[T]], Rule[T]]:
    """Return a decorator that makes a check a rule."""

    def decorate(check: Check[T]) -> Rule[T]:
        return Rule(name, section, fix, check, closed_only)

    return decorate
