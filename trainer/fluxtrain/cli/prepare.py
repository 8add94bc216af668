"""``fluxtrain prepare openmoji``: make the demo's data set, autoencoder and encodings."""

from __future__ import annotations

import argparse

from fluxtrain.cli.files import add_places
from fluxtrain.errors import EXIT_OK, ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "prepare", allow_abbrev=False, help="make a data set", description=__doc__
    )
    parser.add_argument("what", choices=["openmoji"], help="the data set")
    parser.add_argument("--force", action="store_true", help="make it anew even where it is whole")
    add_places(parser)
    parser.set_defaults(action=action)


def action(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Prepare the data set; what is whole already is left alone."""
    from fluxtrain.prepare import prepare_openmoji

    if rest:
        raise ConfigError("arguments", " ".join(rest), "no such option")
    prepare_openmoji(arguments.data.resolve(), arguments.models.resolve(), force=arguments.force)
    return EXIT_OK
