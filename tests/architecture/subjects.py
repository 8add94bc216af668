"""Check subjects of commits: imperative, at most 72 characters. Needs only Python's standard library.

python tests/architecture/subjects.py MESSAGE_FILE    as git's hook commit-msg
python tests/architecture/subjects.py                 commits since the one that size.toml names
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MAX_LENGTH = 72
_SIZES = Path(__file__).with_name("size.toml")
_ARTICLES = {"The", "A", "An", "It"}
_IMPERATIVES = {
    "Embed",
    "Feed",
    "Need",
    "Proceed",
    "Seed",
    "Shed",
    "Speed",
    "Bring",
    "Focus",
    "Ping",
}
"""Verbs that end like a participle or a third person."""


def fault(subject: str) -> str | None:
    """Return what is wrong with ``subject``; None if nothing is."""
    if len(subject) > MAX_LENGTH:
        return f"{len(subject)} characters; at most {MAX_LENGTH} are allowed"
    word = subject.split(" ")[0]
    if not re.fullmatch(r"[A-Z][\w'-]*", word):
        return f"begins with {word!r}; must begin with a verb and a capital letter"
    is_other = word in _ARTICLES or re.search(r"(ed|ing|[^s]s)$", word)
    if is_other and word not in _IMPERATIVES:
        return f"begins with {word!r}; must begin with an imperative, such as Add or Refuse"
    return None


def since(base: str) -> list[str]:
    """Return the subjects of the commits after ``base``; none if the clone's history is shorter."""
    git = ["git", "-C", str(_SIZES.parent)]
    if subprocess.run(
        [*git, "cat-file", "-e", f"{base}^{{commit}}"], capture_output=True
    ).returncode:
        print(f"commit {base} is not in this clone: no subject is checked", file=sys.stderr)
        return []
    log = [*git, "log", "--no-merges", "--format=%s", f"{base}..HEAD"]
    return subprocess.check_output(log, encoding="utf-8").splitlines()


def main(arguments: list[str]) -> int:
    """Print the faults of subjects; return 1 if there is one."""
    if arguments:
        subjects = Path(arguments[0]).read_text(encoding="utf-8").splitlines()[:1]
    else:
        import tomllib  # not of a Python before 3.11, which a hook may have

        subjects = since(tomllib.loads(_SIZES.read_text(encoding="utf-8"))["subjects_since"])
    faults = [(each, found) for each in subjects if (found := fault(each))]
    for subject, found in faults:
        print(f"commit subject {subject!r}: {found}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
