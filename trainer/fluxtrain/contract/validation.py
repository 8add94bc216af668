"""Check values against a model, and say for each wrong field where it is, what was given, what may be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fluxtrain.contract.describe import (
    Schema,
    allowed,
    given,
    is_list,
    key_schema,
    leaf_schema,
    section_of,
    value_schema,
)
from fluxtrain.contract.section import BrokenRulesError, Section
from fluxtrain.errors import UNSET, ConfigError, JoinedConfigError

Model = TypeVar("Model", bound=Section)


def validate(model: type[Model], values: object, at: str) -> Model:
    """Return ``values`` as ``model``; raise ConfigError naming every wrong field below ``at``."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = [line for detail in error.errors() for line in _explain(model, detail, at)]
    raise join(found)


def join(errors: Iterable[ConfigError]) -> ConfigError:
    """Return one error for all of ``errors``, a line each; one line for one field."""
    by_path = {error.path: error for error in reversed(list(errors))}
    kept = list(reversed(by_path.values()))
    return kept[0] if len(kept) == 1 else JoinedConfigError(kept)


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" for the name that ``given`` most likely stands for, or the choice."""
    names = list(names)
    plain = {_plain(name): name for name in names} | {_initials(name): name for name in names}
    found = [plain[_plain(given)]] if _plain(given) in plain else []
    found += difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else f"; there are {', '.join(names)}"


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split("_") if word) if "_" in name else _plain(name)


def _explain(model: type[Section], detail: ErrorDetails, at: str) -> Iterator[ConfigError]:
    place, path = _place(model, detail["loc"], at)
    kind = detail["type"]
    if kind == "value_error":
        error = detail["ctx"]["error"]
        assert isinstance(error, BrokenRulesError), "sections state rules, nothing else raises"
        for rule in error.broken:
            given = error.section.look_up(rule.field) if rule.field else UNSET
            where = f"{path}.{rule.field}".strip(".")
            yield ConfigError(where, given, rule.explain(error.section))
    elif kind == "extra_forbidden":
        *above, name = detail["loc"]
        names = section.file_names() if (section := _section(model, above)) else []
        yield ConfigError(path, UNSET, f"no such field{did_you_mean(str(name), names)}")
    elif kind == "missing":
        yield ConfigError(path, UNSET, f"must be given: {_words(place)}")
    else:
        yield ConfigError(path, detail["input"], f"must be {_words(place)}")


Place = type[Section] | Schema


def _place(model: type[Section], location: Iterable[int | str], at: str) -> tuple[Place, str]:
    """Return what stands at ``location`` below ``model``, and its path as a person writes it."""
    place: Place = model
    mapping: Schema = {}
    key: int | str = ""
    path = at
    for part in location:
        if part == "[key]":  # the key itself is wrong: its name is what was given, not a place
            return key_schema(mapping), path.removesuffix(f".{key}")
        if isinstance(place, type):
            field = place.model_fields.get(_attribute(place, part))
            path = f"{path}.{part}".strip(".")
            if field is None:
                break
            below = section_of(field.annotation)
            place = below if below and not is_list(field) else leaf_schema(field)
            item = below
        elif isinstance(part, int):
            path = f"{path}[{part}]"
            listed = given(place)
            items = listed.get("items") or listed.get("prefixItems", [{}])[0]
            place = item if item is not None else items
        elif given(place).get("type") == "object":
            path = f"{path}.{part}"
            mapping, key = given(place), part
            place = value_schema(mapping) or mapping
    return place, path


def _attribute(section: type[Section], name: Any) -> str:
    return section.attribute(name) if name in section.file_names() else ""


def _section(model: type[Section], location: Iterable[int | str]) -> type[Section] | None:
    place, _ = _place(model, location, "")
    return place if isinstance(place, type) else None


def _words(place: Place) -> str:
    if isinstance(place, type):
        return f"a mapping with some of {', '.join(place.file_names())}"
    return allowed(place)
