"""Read and validate a FluxTraining file."""

from __future__ import annotations

import mimetypes
import re
import shlex
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from fluxtrain.contract.model_base import closest, validate
from fluxtrain.contract.resource.fluxtraining import FluxTraining
from fluxtrain.errors import UNSET, ConfigError

_MAX_BYTES = 1 << 20
_MAX_NODES = 100_000
"""Values of a document: PyYAML takes a kilobyte and 30 microseconds for each."""
_FAULTS = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError)
"""What PyYAML raises for explicit tags whose values are malformed, such as !!int ''."""
_FLOAT = re.compile(
    r"[-+]?(\d[\d_]*)(\.\d*)?([eE][-+]?\d+)|[-+]?\d[\d_]*\.\d*|[-+]?\.\d+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_INTEGER = re.compile(r"[-+]?(0b[01_]+|0[0-7_]+|0x[\da-fA-F_]+|0|[1-9][\d_]*)")


class _Loader(yaml.SafeLoader):
    """YAML as Kubernetes reads it: 1e-4 is a number, 1:30 is text. Duplicate keys and aliases are refused."""

    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.num_nodes += 1
        if self.num_nodes > _MAX_NODES:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            text = f"more than {_MAX_NODES} values"
            raise yaml.composer.ComposerError(None, None, text, mark)
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not read", event.start_mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        # JSON writes an emoji as two escapes, a surrogate pair
        text: str = super().construct_scalar(node)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                message = "a key must be a string or a number"
                raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                message = f"duplicate key {key!r}"
                raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_REPLACED = ("float", "int", "timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0].rpartition(":")[2] not in _REPLACED]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader`, and Kubernetes, would read as a number, such as 1e-4."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+0123456789.")
    )
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(f"^(?:{_INTEGER.pattern})$"), list("-+0123456789")
    )


def load_job(path: Path) -> FluxTraining:
    """Return the job in ``path``; raise ConfigError naming the line or every wrong field."""
    if text := _no_file(path):
        raise ConfigError(str(path), UNSET, text)
    values = parse_yaml(read_text(path), str(path))
    text = "must be one FluxTraining, a mapping with apiVersion and kind"
    if not isinstance(values, dict):
        raise ConfigError(str(path), values, text)
    if values and not _KEYS & set(values):
        text = BARE_RUN if "preset" in values else f"{text}; {_import(path)}"
        raise ConfigError(str(path), UNSET, text)
    return validate(FluxTraining, values, "")


def _no_file(path: Path) -> str:
    """Return why ``path`` is not read, and what to do instead; "" if it is."""
    given = shlex.quote(str(path))
    if path.suffix in _FOREIGN:
        text = "must be a FluxTraining, as YAML; docs/coming-from.md has what replaces torchtitan's keys"
        return f"{text}; {_import(path)}"
    if path.is_dir():
        return f"is a folder; of pictures, fluxtrain init {given} writes a file"
    if (mimetypes.guess_type(path.name)[0] or "").startswith("image/"):
        folder = shlex.quote(str(path.parent))
        return f"is a picture; fluxtrain init {folder} writes a file for its folder"
    if path.suffix == ".safetensors":
        text = "holds weights; spec.run.initial_weights of a FluxTraining names them to train, and "
        return f"{text}fluxtrain sample {given} makes images with them"
    return "" if path.exists() else f"cannot be read (No such file or directory){_instead(path)}"


_FOREIGN = {".toml", ".env", ".sh"}
_KEYS = {"apiVersion", "kind", "metadata", "spec"}
BARE_RUN = "is spec.run of a FluxTraining: put it there (docs/config.md)"


def _instead(path: Path) -> str:
    files = [*Path("examples").glob("*.yaml"), *path.parent.glob("*.yaml")]
    by_name = {file.stem: file for file in files}
    if name := closest(path.stem, by_name):
        return f"; did you mean {by_name[name]}?"
    is_file = path.suffix in (".yaml", ".yml", ".json")
    return "" if is_file else "; of a folder of pictures, fluxtrain init FOLDER writes a file"


def _import(path: Path) -> str:
    return f"for another trainer's options, fluxtrain import-config {shlex.quote(str(path))} writes one"


def parse_yaml(text: str, source: str) -> Any:
    """Return the one YAML document in ``text``; ``source`` names it in errors."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{source} line {mark.line + 1}, column {mark.column + 1}" if mark else source
        raise ConfigError(at, UNSET, f"invalid YAML: {_problem(error)}") from None
    except RecursionError:
        raise ConfigError(source, UNSET, "invalid YAML: nested too deeply") from None
    except _FAULTS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(source, UNSET, f"invalid YAML: {reason}") from None


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "malformed"
    if "expected a single document" in str(error):
        return "more than one document; use one file per job"
    return "tabs are not allowed; indent with spaces" if "'\\t'" in problem else problem


def dump_yaml(document: object) -> str:
    """Return ``document`` as YAML that `parse_yaml` and Kubernetes read as the same."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def read_text(path: Path) -> str:
    """Return the text of a small file; raise ConfigError if it is large, unreadable or not UTF-8."""
    try:
        # it may be a pipe, as in `fluxtrain plan <(envsubst < job.yaml)`
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            size = f"{path.stat().st_size} bytes" if path.is_file() else "more"
            raise ConfigError(str(path), size, f"at most {_MAX_BYTES} are read")
        return content.decode("utf-8-sig")  # as editors of Windows write it
    except OSError as error:
        raise ConfigError(str(path), UNSET, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), UNSET, f"not UTF-8 text (byte {error.start})") from None
