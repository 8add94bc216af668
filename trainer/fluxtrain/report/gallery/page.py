"""A run as one HTML page that needs nothing else: no script, no other file, no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from fluxtrain import __version__
from fluxtrain.report.console import duration
from fluxtrain.report.gallery.style import STYLE

if TYPE_CHECKING:
    from fluxtrain.report.gallery.pictures import Picture

Figure = tuple[str, str]
"""A name and its value, in words."""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content-Security-Policy of the page: its own style and pictures, and nothing else."""
_REFRESH_SECONDS = 10
_GIB = 1 << 30


@dataclass(frozen=True)
class Contents:
    """What a page shows; texts are escaped by it."""

    title: str
    figures: Sequence[Figure] = ()
    curve: str = ""
    """An svg element of our own."""
    steps: Sequence[int] = ()
    rows: Sequence[tuple[Picture | None, Sequence[Picture | None]]] = ()
    notes: Sequence[str] = ()
    settings: Sequence[Figure] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    attribution: str = ""
    links: bool = False
    """Whether pictures link to their files, which are beside the page."""
    is_live: bool = False
    """Whether the page is loaded again every few seconds."""


def render(contents: Contents) -> str:
    """Return the page."""
    refresh = f'<meta http-equiv="refresh" content="{_REFRESH_SECONDS}">' * contents.is_live
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"{refresh}<title>{escape(contents.title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(contents.title)}</h1>",
        _figures(contents.figures),
        *_samples(contents),
        *_curve(contents),
        *_settings(contents),
        f"<footer>{escape(contents.attribution)} <span>fluxtrain {__version__}</span></footer>",
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def record_figures(record: Mapping[str, Any], steps: int, epoch: str) -> Iterable[Figure]:
    """Yield the figures of the newest logged step of a training of ``steps``, in ``epoch`` if it is known."""
    yield "step", f"{record['step']:,} of {steps:,}"
    if epoch:
        yield "epoch", epoch
    yield "loss", f"{record['train_loss']:.4f}"
    yield "samples/s", f"{record['samples_per_second']:,.3g}"
    if record.get("mfu") is not None:
        yield "MFU", f"{record['mfu']:.1%}"
    memory = record.get("memory_reserved_bytes") or record.get("memory_allocated_bytes")
    if memory:
        yield "memory of a rank", f"{memory / _GIB:.1f} GiB"
    yield "training time", duration(record["seconds"])


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures
    )
    return f'<dl class="figures">{items}</dl>'


def _samples(contents: Contents) -> Iterable[str]:
    if not contents.rows:
        return
    has_originals = any(original for original, _ in contents.rows)
    head = "<th></th>" + "<th>original</th>" * has_originals
    head += "".join(f"<th>step {step:,}</th>" for step in contents.steps)
    yield f'<h2>Samples</h2><div class="wide"><table class="samples"><thead><tr>{head}</tr></thead><tbody>'
    for original, pictures in contents.rows:
        shown = next(picture for picture in pictures if picture)
        cells = _cell(original, contents.links) if has_originals else ""
        cells += "".join(_cell(picture, contents.links) for picture in pictures)
        yield f"<tr><th>{_prompt(shown)}</th>{cells}</tr>"
    yield "</tbody></table></div>"
    yield from (f'<p class="note">{escape(note)}</p>' for note in contents.notes)


def _prompt(picture: Picture) -> str:
    fields = picture.fields
    details = [f"{picture.width} × {picture.height}", f"seed {fields.get('seed', '?')}"]
    details.append(f"{fields.get('steps', '?')} steps")
    if fields.get("guidance"):
        details.append(f"guidance {fields['guidance']}")
    if fields.get("cfg_scale", "1.0") != "1.0":
        details.append(f"cfg {fields['cfg_scale']}")
    if fields.get("negative_prompt"):
        details.append(f"without: {fields['negative_prompt']}")
    text = escape(fields.get("prompt", ""))
    return f'<span class="prompt">{text}</span><small>{escape(" · ".join(details))}</small>'


def _cell(picture: Picture | None, links: bool) -> str:
    if picture is None:
        return "<td></td>"
    text = escape(picture.fields.get("prompt", ""), quote=True)
    image = f'<img src="{picture.data}" alt="{text}">'
    if links:
        image = f'<a href="{escape(picture.file, quote=True)}">{image}</a>'
    return f"<td>{image}</td>"


def _curve(contents: Contents) -> Iterable[str]:
    if contents.curve:
        yield f'<h2>Loss over training samples</h2><div class="curve">{contents.curve}</div>'
        keys = [("raw", "each logged step"), ("smooth", "smoothed")]
        keys += [
            (kind, kind) for kind in ("evaluation", "target") if f'="{kind}"' in contents.curve
        ]
        items = "".join(f'<li class="{kind}">{text}</li>' for kind, text in keys)
        yield f'<ul class="legend">{items}</ul>'


def _settings(contents: Contents) -> Iterable[str]:
    if not contents.settings:
        return
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in contents.settings
    )
    yield f'<h2>Settings</h2><table class="settings">{rows}</table>'
    text = escape(json.dumps(contents.config, indent=2, ensure_ascii=False))
    yield f"<details><summary>every field</summary><pre>{text}</pre></details>"
