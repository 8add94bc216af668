"""``fluxtrain prepare encoders``: T5, CLIP and the autoencoder from a folder, a manifest or the Hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fluxtrain.cli.arguments import path
from fluxtrain.errors import EXIT_OK, UNSET, ConfigError

if TYPE_CHECKING:
    from fluxtrain.prepare.encoders.place import Place

_PLACE = "DIR|MANIFEST|hf://ORG/NAME"
_OPTIONS = {
    "t5": "folder of T5 in transformers' format, with its tokenizer",
    "t5_tokenizer": "folder of T5's tokenizer, if it is another one",
    "clip": "folder of CLIP's text encoder in transformers' format, with its tokenizer",
    "clip_tokenizer": "folder of CLIP's tokenizer, if it is another one",
    "autoencoder": "folder that holds ae.safetensors",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = (
        "FLUX.1 as published: text_encoder, text_encoder_2, tokenizer, tokenizer_2, ae.safetensors"
    )
    parser.add_argument("--from", dest="published", metavar=_PLACE, help=text)
    for name, help_text in _OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, metavar=_PLACE, help=f"{help_text} (instead of --from's)")
    text = "the models root, which gets t5, clip and autoencoder (required)"
    parser.add_argument("--output", type=path, required=True, metavar="DIR", help=text)
    parser.add_argument("--force", action="store_true", help="collect them again if they are there")


def action(arguments: argparse.Namespace) -> int:
    """Collect and verify the encoders that the options name."""
    from fluxtrain.prepare.encoders.build import prepare_encoders

    models = arguments.output.resolve()
    prepare_encoders(_wanted(arguments, models), models, arguments.force)
    return EXIT_OK


def _wanted(arguments: argparse.Namespace, models: Path) -> dict[str, list[Place]]:
    """Return the places of each encoder that the options name; raise ConfigError if they name none."""
    from fluxtrain.prepare.encoders.build import PUBLISHED
    from fluxtrain.prepare.encoders.place import parse_place

    def place(name: str) -> Place | None:
        given = getattr(arguments, name)
        flag = "--from" if name == "published" else f"--{name.replace('_', '-')}"
        return None if given is None else parse_place(given, models / f".{name}.download", flag)

    published = place("published")
    wanted: dict[str, list[Place]] = {}
    for name, folders in PUBLISHED.items():
        own, tokenizer = place(name), place(f"{name}_tokenizer") if name != "autoencoder" else None
        if own is not None:
            wanted[name] = [own] if tokenizer is None else [own, tokenizer]
        elif published is not None:
            places = [published.below(folder) for folder in folders]
            wanted[name] = places if tokenizer is None else [places[0], tokenizer]
        elif tokenizer is not None:
            text = "needs the encoder: --from, or the folder of its weights"
            raise ConfigError(f"--{name}-tokenizer", getattr(arguments, f"{name}_tokenizer"), text)
    if not wanted:
        raise ConfigError("--from", UNSET, "give --from, or --t5, --clip or --autoencoder")
    return wanted
