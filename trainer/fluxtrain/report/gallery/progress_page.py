"""The page of a process that has no page of a run: another task, another node, or one that still loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain.report.gallery.page import POLICY, Contents, render

PAGE_HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
)
"""Headers of every page that is served."""


def progress_page(title: str, progress: Mapping[str, Any]) -> str:
    """Return a page with the phase and the steps in ``progress``, the values of /progress."""
    names = {"phase": "phase", "step": "step", "steps": "of", "epoch": "epoch"}
    names |= {"status": "status", "rank": "rank"}
    figures = [(name, str(progress[key])) for key, name in names.items() if key in progress]
    return render(Contents(title, figures, is_live="status" not in progress))
