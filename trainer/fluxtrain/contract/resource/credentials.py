"""Credentials belong in Secrets, not in a resource that many may read: the rule against literal ones."""

from __future__ import annotations

import re
from typing import Any

from fluxtrain.contract.strict_model import Rule

_NAMES = ("_TOKEN", "_SECRET", "_KEY", "_PASSWORD")
"""How the names of variables with credentials end: HF_TOKEN, AWS_SECRET_ACCESS_KEY, WANDB_API_KEY."""
_VALUES = ("hf_", "AKIA", "ASIA", "gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_")
"""How tokens of Hugging Face, AWS and GitHub begin; those have 20 characters or more."""
_MIN_LENGTH = 20


def _holds(variable: Any) -> bool:
    value = variable.value or ""
    is_reference = value.startswith("$(") and value.endswith(")")
    named = variable.name.upper().endswith(_NAMES)
    looks_like_one = len(value) >= _MIN_LENGTH and value.startswith(_VALUES)
    return not value or is_reference or not (named or looks_like_one)


_KEY_SECRET = "-key-[0-9a-f]{8}$"
"""How the names of the operator's Secrets with the keys of rendezvous services end."""

NO_RENDEZVOUS_KEY = Rule(
    "credentials",
    "must not end with -key- and eight hexadecimal digits: the operator's own Secrets have such names",
    lambda spec: not any(re.search(_KEY_SECRET, name) for name in spec.credentials),
    f"!self.credentials.exists(name, name.matches('{_KEY_SECRET}'))",
)
"""The rule of the spec: the key of one job is no variable of another."""


def _any(test: str, words: tuple[str, ...]) -> str:
    return " || ".join(f"{test}('{word}')" for word in words)


NO_LITERAL_CREDENTIAL = Rule(
    "value",
    "must not be a credential: put it into a Secret, and name that in spec.credentials or in valueFrom",
    _holds,
    "self.value == '' || (self.value.startsWith('$(') && self.value.endsWith(')')) || "
    f"!({_any('self.name.upperAscii().endsWith', _NAMES)} || "
    f"(self.value.size() >= {_MIN_LENGTH} && ({_any('self.value.startsWith', _VALUES)})))",
    others=("name",),
)
"""The rule of every environment variable: what is in a resource, can be read by whoever may view it."""
