"""Limit: a condition of the values at one path of a job, for the operator and, as CEL, for the API server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fluxtrain_operator.job_policy import JobPolicy

_ITEMS = "[]"
_KEYS = "{}"


@dataclass(frozen=True)
class Limit:
    """What the values at a path must be; values that are not set are not checked."""

    at: str
    """Path from the resource; ``[]`` stands for each item of a list, ``{}`` for each key of a mapping."""
    allowed: str
    """What is allowed, for people."""
    holds: Callable[[Any, JobPolicy], bool]
    """Returns whether a value is allowed."""
    cel: str
    """The same condition in CEL: ``@`` is the value, ``variables`` has the lists of the policy."""

    def violations(
        self, manifest: Mapping[str, Any], policy: JobPolicy
    ) -> Iterator[tuple[str, Any]]:
        """Yield path and value of what ``manifest`` has at the path and is not allowed."""
        for path, value in _values(manifest, _parts(self.at), ""):
            if not self._holds(value, policy):
                yield path, value

    def _holds(self, value: Any, policy: JobPolicy) -> bool:
        """Return whether ``value`` is allowed; one of another type than Kubernetes' is not."""
        try:
            return self.holds(value, policy)
        except (AttributeError, KeyError, TypeError):
            return False

    @property
    def expression(self) -> str:
        """Return the CEL expression of ``object``."""
        return _expression("object", _parts(self.at), self.cel, 0)


def fields(at: str, *names: str) -> Limit:
    """Return the limit that a mapping has no other fields than ``names``."""
    listed = ", ".join(names)
    return Limit(
        at,
        f"may only set {listed}" if names else "must be left out",
        lambda value, policy: isinstance(value, Mapping) and set(value) <= set(names),
        f"@.all(k, k in {_cel(names)})",
    )


def one_of(at: str, *values: str | bool) -> Limit:
    """Return the limit that a value is one of ``values``."""
    listed = " or ".join(json.dumps(value) if value != "" else "empty" for value in values)
    return Limit(
        at,
        f"must be {listed}",
        lambda value, policy: any(value == one and type(value) is type(one) for one in values),
        f"@ in {_cel(values)}",
    )


def listed(at: str, name: str, key: str = "") -> Limit:
    """Return the limit that the list ``name`` of the policy allows a value, or its field ``key``."""
    value, patterns = f"@.?{key}.orValue('')" if key else "@", f"variables.{name}"
    allowed = f"{patterns}.exists(p, !p.startsWith('!') && {_matches(value, 'p')})"
    excluded = f"{patterns}.exists(p, p.startsWith('!') && {_matches(value, 'p.substring(1)')})"
    every = f"'*' in {patterns} && !{patterns}.exists(p, p.startsWith('!'))"

    def holds(given: Any, policy: JobPolicy) -> bool:
        return policy.allows(name, given.get(key, "") if key else given)

    return Limit(
        at,
        f"must be allowed by jobs.{name}, a setting of the operator",
        holds,
        f"({value} == '' ? ({every}) : ({allowed} && !{excluded}))",
    )


def _matches(value: str, pattern: str) -> str:
    """Return CEL for whether ``value`` matches ``pattern``."""
    begin = f"{pattern}.substring(0, {pattern}.size() - 1)"
    return f"({pattern}.endsWith('*') ? {value}.startsWith({begin}) : {value} == {pattern})"


def _cel(values: tuple[str | bool, ...]) -> str:
    """Return a CEL list; texts are single-quoted, as the expressions are YAML texts."""
    return f"[{', '.join(json.dumps(value).replace(chr(34), chr(39)) for value in values)}]"


def _parts(path: str) -> list[str]:
    """Return the fields of ``path``, with [] and {} by themselves."""
    return path.replace(_ITEMS, f".{_ITEMS}").replace(_KEYS, f".{_KEYS}").split(".")


def _values(value: Any, parts: list[str], path: str) -> Iterator[tuple[str, Any]]:
    """Yield all values at ``parts`` below ``value`` with their paths; what has another type as it is."""
    if not parts:
        yield path, value
        return
    first, rest = parts[0], parts[1:]
    if first == _ITEMS and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _values(item, rest, f"{path}[{number}]")
    elif first == _KEYS and isinstance(value, Mapping):
        for key in value:
            yield from _values(key, rest, f"{path}.{key}")
    elif first in (_ITEMS, _KEYS) or not isinstance(value, Mapping):
        yield path, value  # refused, as no limit of what is below allows it
    elif first in value:
        yield from _values(value[first], rest, f"{path}.{first}".lstrip("."))


def _expression(value: str, parts: list[str], cel: str, depth: int) -> str:
    """Return CEL for whether ``cel`` holds for all values at ``parts`` below ``value``."""
    names = parts[: next((n for n, part in enumerate(parts) if part in (_ITEMS, _KEYS)), None)]
    rest = parts[len(names) :]
    found = ".?".join([value, *names])
    direct = ".".join([value, *names])
    if not rest:
        inner = cel.replace("@", direct)
        return f"!{found}.hasValue() || {inner}" if names else inner
    item = f"x{depth}"
    inner = _expression(item, rest[1:], cel, depth + 1)
    empty = "[]" if rest[0] == _ITEMS else "{}"
    return (
        f"{found}.orValue({empty}).all({item}, {inner})"
        if names
        else f"{value}.all({item}, {inner})"
    )
