"""The base of every model in the contract: frozen, strict, with bounded types and rules between fields."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fluxtrain.errors import UNSET, ConfigError, JoinedConfigError

_ONE_LINE = r"^[^\x00-\x1f\x7f]+$"

Path = Annotated[
    str,
    Field(min_length=1, max_length=1024, pattern=_ONE_LINE, title="a path of 1 to 1024 characters"),
]
OptionalPath = Annotated[
    Path | None, BeforeValidator(lambda value: None if value == "none" else value)
]
"""A path, or ``none``, which is null: a null in a file would be dropped on the way to a cluster."""
Label = Annotated[
    str,
    Field(min_length=1, max_length=128, pattern=_ONE_LINE, title="one line of 1 to 128 characters"),
]
Sha256 = Annotated[
    str,
    Field(
        min_length=64,
        max_length=64,
        pattern="^[0-9a-f]{64}$",
        title="a SHA-256 digest, 64 hexadecimal digits",
    ),
]
Positive = Annotated[int, Field(ge=1, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Width = Annotated[int, Field(ge=1, le=65_536)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class Immutable:
    """Marks a field that cannot change while the job exists: another value is another run."""


IMMUTABLE = Immutable()


@dataclass(frozen=True)
class Rule:
    """A validation rule between fields of a model, checked in Python and, as CEL, by the API server."""

    field: str
    """The field that the error names, as in the file; empty for the model itself."""
    message: str
    """What ``field`` must be, such as "must be a multiple of num_heads"."""
    holds: Callable[[Any], bool]
    """Returns whether a model obeys the rule."""
    cel: str
    """The CEL expression for ``holds``, in terms of ``self``, with the field names of the file."""
    others: tuple[str, ...] = ()
    """The other fields of the rule; the API server checks it only if all of them are set."""

    def explain(self, model: StrictModel) -> str:
        """Return the message with the values of the other fields in ``model``."""
        values = [f"{name} is {model.look_up(name)}" for name in self.others]
        return "; ".join([self.message, *values])


class BrokenRulesError(ValueError):
    """Some rules of one model do not hold; pydantic reports it with the path of the model."""

    def __init__(self, model: StrictModel, broken: list[Rule]) -> None:
        self.model, self.broken = model, broken
        super().__init__("; ".join(f"{rule.field} {rule.message}" for rule in broken))


class StrictModel(BaseModel):
    """A frozen model that refuses unknown fields and implicit conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [rule for rule in self.rules if not rule.holds(self)]
        if broken:
            raise BrokenRulesError(self, broken)
        return self

    def look_up(self, path: str) -> Any:
        """Return the value at ``path``, written with the names of the file."""
        return reduce(
            lambda model, name: getattr(model, model.attributes()[name]), path.split("."), self
        )

    @classmethod
    def attributes(cls) -> dict[str, str]:
        """Return the attribute of every field by its name in the file."""
        return {field.alias or name: name for name, field in cls.model_fields.items()}


Model = TypeVar("Model", bound=StrictModel)


def validate(model: type[Model], values: object, at: str) -> Model:
    """Return ``values`` as ``model``; raise ConfigError naming every wrong field below ``at``.

    A float with an integral value, such as 1e3, is accepted for an integer.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        unset = "default_factory_not_called"  # the field that it follows is wrong
        details = [detail for detail in error.errors() if detail["type"] != unset]
    if integral := [detail["loc"] for detail in details if _is_integral(detail)]:
        return validate(model, _with_integers(values, integral), at)
    raise join_errors(error for detail in details for error in _explain(model, detail, at))


def join_errors(errors: Iterable[ConfigError], most: int = 10) -> ConfigError:
    """Return one error for all of ``errors``: the first of each path, one line each, ``most`` of them."""
    by_path = {error.path: error for error in reversed(list(errors))}
    kept = list(reversed(by_path.values()))
    return kept[0] if len(kept) == 1 else JoinedConfigError(kept, most)


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" for the name closest to ``given``, or the list of all names."""
    names = list(names)
    return near_miss(given, names) or f"; there are {', '.join(names)}"


_WORDS = {
    "optim.learning_rate": "lr",
    "optim.name": "optimizer optimizer_type",
    "optim.weight_decay": "wd",
    "optim.max_grad_norm": "clip_grad grad_clip max_norm",
    "schedule.steps": "steps iters iterations max_steps max_train_steps num_train_steps train_steps",
    "schedule.epochs": "num_epochs max_train_epochs num_train_epochs",
    "schedule.decay": "lr_scheduler scheduler",
    "schedule.warmup_steps": "warmup lr_warmup_steps",
    "schedule.global_batch_size": "bs batch batch_size train_batch_size gradient_accumulation_steps",
    "parallel.micro_batch_size": "bs batch batch_size train_batch_size gradient_accumulation_steps",
    "parallel.activation_checkpointing": "gradient_checkpointing",
    "data.images": "images dataset dataset_path",
    "data.image_size": "resolution size",
    "data.buckets.resolutions": "resolution",
    "data.caption_prefix": "trigger trigger_word instance_prompt",
    "adapter.rank": "network_dim lora_rank dim",
    "adapter.alpha": "network_alpha lora_alpha",
    "precision.compute": "mixed_precision dtype",
    "checkpoint.every_steps": "save_every save_every_n_steps save_steps checkpointing_steps",
    "sampling.every_steps": "sample_every sample_every_n_steps",
    "evaluation.every_samples": "eval_every eval_freq",
    "sampling.cfg_scale": "cfg",
    "logging.wandb.project": "wandb_project",
}
"""Fields of ``spec.run``, and what other trainers call them."""


def meant_fields(given: str, model: type[StrictModel]) -> list[str]:
    """Return the paths below ``model`` of the fields that the word ``given`` means, or whose name it is."""
    paths = [field.path for field in iter_fields(model) if "[]" not in field.path]
    word = given.replace("-", "_").lower()
    if found := [path for path, words in _WORDS.items() if word in words.split() and path in paths]:
        return found
    named = [path for path in paths if _normalize(path.rpartition(".")[2]) == _normalize(given)]
    least = min((path.count(".") for path in named), default=0)
    return [path for path in named if path.count(".") == least]


def near_miss(given: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" for the name closest to ``given``, "" if none is close."""
    name = closest(given, names)
    return "" if name is None else f"; did you mean {name}?"


def closest(given: str, names: Iterable[str]) -> str | None:
    names = sorted(names)
    normalized = {_normalize(name): name for name in names} | {_initials(n): n for n in names}
    matches = [normalized[_normalize(given)]] if _normalize(given) in normalized else []
    matches += difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    return matches[0] if matches else None


def _normalize(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split("_") if word) if "_" in name else _normalize(name)


def _is_integral(detail: ErrorDetails) -> bool:
    value = detail["input"]
    return detail["type"] == "int_type" and isinstance(value, float) and value.is_integer()


def _with_integers(values: Any, locations: list[tuple[int | str, ...]]) -> Any:
    """Return a copy of ``values`` with the floats at ``locations`` as integers."""
    values = copy.deepcopy(values)
    for location in locations:
        *above, last = _without_alternative(values, location)
        container = reduce(lambda value, key: value[key], above, values)
        container[last] = int(container[last])
    return values


def _without_alternative(values: Any, location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return pydantic's ``location`` of a number in ``values`` without the name of an alternative type."""
    *above, _ = location
    number = reduce(lambda value, key: value[key], above, values)
    return location if isinstance(number, (dict, list)) else tuple(above)


def _explain(model: type[StrictModel], detail: ErrorDetails, at: str) -> Iterator[ConfigError]:
    node, path = _resolve(model, detail["loc"], at)
    kind = detail["type"]
    if kind == "value_error":
        error = detail["ctx"]["error"]
        assert isinstance(error, BrokenRulesError), "models have rules, nothing else raises"
        for rule in error.broken:
            value = error.model.look_up(rule.field) if rule.field else UNSET
            yield ConfigError(f"{path}.{rule.field}".strip("."), value, rule.explain(error.model))
    elif kind == "extra_forbidden":
        *above, name = detail["loc"]
        parent, _ = _resolve(model, above, "")
        names, meant = [], []
        if isinstance(parent, type):
            names, meant = list(parent.attributes()), meant_fields(str(name), parent)
            if not meant and not near_miss(str(name), names):
                meant = [f"{at}.{path}".strip(".") for path in meant_fields(str(name), model)]
        hint = f"; did you mean {' or '.join(meant)}?" if meant else did_you_mean(str(name), names)
        yield ConfigError(path, UNSET, f"no such field{hint}")
    elif kind == "missing":
        yield ConfigError(path, UNSET, f"must be given: {allowed(node)}")
    else:
        given, text = detail["input"], allowed(node)
        hint = _near_value(given, node) if kind == "literal_error" else ""
        if " number " in text and isinstance(given, str) and given[:1].isdigit():
            hint = "; a number has neither quotes, commas nor a unit"
        yield ConfigError(path, given, f"must be {text}{hint}")


def _near_value(given: Any, schema: Node) -> str:
    """Return "; did you mean X?" for the allowed text closest to ``given``, or those that share a word."""
    names = [] if isinstance(schema, type) else schema.get("enum", [])
    if not isinstance(given, str) or not all(isinstance(name, str) for name in names):
        return ""
    words = set(re.split("[-_ ]", given.lower()))
    shared = [name for name in names if words & set(name.split("-"))]
    meant = f"; did you mean {' or '.join(shared)}?" if shared else ""
    return near_miss(given, names) or meant


def _resolve(model: type[StrictModel], location: Iterable[int | str], at: str) -> tuple[Node, str]:
    """Return the model or schema at pydantic's ``location`` below ``model``, and its path in the file."""
    node: Node = model
    mapping: Schema = {}
    key: int | str = ""
    path = at
    for part in location:
        if part == "[key]":  # the key itself is wrong: the error names the mapping
            return key_schema(mapping), path.removesuffix(f".{key}")
        if isinstance(node, type):
            path = f"{path}.{part}".strip(".")
            attribute = node.attributes().get(str(part))
            if attribute is None:
                break
            node = node_of(node.model_fields[attribute])
        elif isinstance(part, int):
            path = f"{path}[{part}]"
            listed = non_null(node)
            node = listed.get("items") or listed.get("prefixItems", [{}])[0]
        elif non_null(node).get("type") == "object":
            path = f"{path}.{part}"
            mapping, key = non_null(node), part
            node = value_schema(mapping) or mapping
    return node, path


Schema = dict[str, Any]
Node = type[StrictModel] | Schema
"""A model, or the JSON schema of a field that is none; the items of a list may be a model."""
_TYPES = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}


@dataclass(frozen=True)
class FieldDoc:
    """Documentation of one field that is not a model itself."""

    path: str
    """Path in the file, such as ``optim.learning_rate``."""
    immutable: bool
    """Whether it cannot change while the job exists."""
    info: FieldInfo
    """Pydantic's description."""

    @property
    def allowed(self) -> str:
        return allowed(node_of(self.info))

    @property
    def description(self) -> str:
        """Return the docstring under the field."""
        return " ".join((self.info.description or "").split())


def iter_fields(
    model: type[StrictModel], path: str = "", immutable: bool = False
) -> Iterator[FieldDoc]:
    """Yield the documentation of every field of ``model`` and of the models below it, in order."""
    for name, field in model.model_fields.items():
        at = f"{path}{field.alias or name}"
        fixed = immutable or any(isinstance(mark, Immutable) for mark in field.metadata)
        below = model_of(field.annotation)
        if below is None:
            yield FieldDoc(at, fixed, field)
        else:
            listed = "[]" if is_list(field.annotation) else ""
            yield from iter_fields(below, f"{at}{listed}.", fixed)


def model_of(annotation: Any) -> type[StrictModel] | None:
    """Return the model in ``annotation``: ``X``, ``X | None`` or ``list[X]``; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return annotation
    models = (model_of(argument) for argument in get_args(annotation))
    return next((model for model in models if model is not None), None)


def is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(map(is_list, get_args(annotation)))


def node_of(field: FieldInfo) -> Node:
    """Return the model of ``field``, or its JSON schema with its bounds."""
    below = model_of(field.annotation)
    if below is not None and not is_list(field.annotation):
        return below
    kind: Any = Annotated[(field.annotation, None, *field.metadata)]
    schema = TypeAdapter(kind).json_schema()
    if below is not None:
        non_null(schema)["items"] = below
    return {**schema, **({"title": field.title} if field.title else {})}


def non_null(schema: Schema) -> Schema:
    """Return the one alternative of ``schema`` beside null, or ``schema`` if there is no single one."""
    options = [option for option in schema.get("anyOf", []) if option.get("type") != "null"]
    return options[0] if len(options) == 1 else schema


def allowed(schema: Node) -> str:
    """Return the values that ``schema`` allows, in words, such as "a whole number from 1 to 64"."""
    if isinstance(schema, type):
        return f"a mapping with some of {', '.join(schema.attributes())}"
    if "anyOf" in schema:
        return " or ".join(allowed(option) for option in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(str(value) for value in schema['enum'])}"
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type", "")
    if kind == "string":
        form = f" like {schema['pattern']}" if "pattern" in schema else ""
        return schema.get("title") or f"text{_between(schema, 'Length', ' characters')}{form}"
    if kind == "array":
        items = schema.get("items") or schema["prefixItems"][0]
        return f"a list{_between(schema, 'Items', ' entries')}, each {allowed(items)}"
    if kind == "object":
        return _mapping(schema)
    return f"{_TYPES.get(kind, kind)}{_range(schema)}"


def value_schema(schema: Schema) -> Schema | None:
    """Return the schema of the values of a mapping, None if they are not restricted."""
    patterns = iter(schema.get("patternProperties", {}).values())
    values = schema.get("additionalProperties") or next(patterns, None)
    return values if isinstance(values, dict) else None


def key_schema(schema: Schema) -> Schema:
    """Return the schema of the keys of a mapping."""
    pattern = next(iter(schema.get("patternProperties", {})), None)
    keys = {"type": "string", **schema.get("propertyNames", {})}
    return keys if pattern is None else {**keys, "pattern": pattern}


def _mapping(schema: Schema) -> str:
    values = value_schema(schema)
    if values is None:
        return "a mapping"
    return f"a mapping{_between(schema, 'Properties', ' entries')}, each {allowed(values)}"


def _between(schema: Schema, what: str, unit: str) -> str:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if most is None:
        return ""
    if least == most:
        return f" of {most}{unit}"
    return f" of {least} to {most}{unit}" if least else f" of at most {most}{unit}"


def _range(schema: Schema) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        text = f" from {_number(low)} to {_number(high)}"
    else:
        parts = [("at least", low), ("above", above), ("at most", high), ("below", below)]
        text = " and".join(f" {word} {_number(n)}" for word, n in parts if n is not None)
    return f"{text}, a multiple of {schema['multipleOf']}" if "multipleOf" in schema else text


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else re.sub(r"e\+?(-?)0*", r"e\1", f"{value:g}")


# The base of the models outside ``spec.run``, with camelCase names, and Kubernetes' string types.


GROUP = "fluxtrain.dev"
"""API group of the resource, and prefix of its labels and annotations."""

Name = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        min_length=1,
        max_length=63,
        title="a name of 1 to 63 lower-case letters, digits and '-', with no '-' at its ends",
    ),
]
Subdomain = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        max_length=253,
        title="a name of at most 253 lower-case letters, digits, '-' and '.'",
    ),
]
Image = Annotated[
    str,
    Field(
        pattern=r"^[!-~]+$",
        max_length=1024,
        title="an image of 1 to 1024 ASCII characters with no blanks",
    ),
]
Quantity = Annotated[
    str,
    Field(
        pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$",
        max_length=32,
        title="a quantity such as 500Mi or 2Ti",
    ),
]
ResourceName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        max_length=128,
        title="an extended resource such as amd.com/gpu",
    ),
]
LabelValue = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
        max_length=63,
        title="a label's value: at most 63 letters, digits, '-', '_' and '.'",
    ),
]
LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        max_length=317,
        title="a label's key such as kubernetes.io/arch",
    ),
]
Seconds = Annotated[int, Field(ge=0, le=2**31 - 1)]
ApiCount = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ApiModel(StrictModel):
    """A model whose fields have camelCase names in the file."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=False)
