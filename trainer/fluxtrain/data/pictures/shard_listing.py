"""What a shard holds, kept in the cache while the shard itself is not: names, sizes and captions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.data.pictures.faults import read_faults
from fluxtrain.data.pictures.folder import Listing, PictureFile, in_order, list_pictures
from fluxtrain.files import atomic_write_by_several, sync


@dataclass(frozen=True)
class ShardListing:
    """The pictures of one shard, which is unpacked into a folder of its own."""

    pictures: tuple[PictureFile, ...]
    skipped: dict[str, str]
    """Files of its folder that are not used, with the reason."""
    faults: dict[str, str]
    """What was left out when it was unpacked, with the reason."""

    def write(self, path: Path) -> None:
        """Write it to the file ``path``."""
        values = {
            "pictures": [[each.name, each.size, each.caption] for each in self.pictures],
            "skipped": self.skipped,
            "faults": self.faults,
        }
        with atomic_write_by_several(path) as partial:
            partial.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
            sync(partial)


def list_shard(folder: Path) -> ShardListing:
    """Return what is in ``folder``, into which a shard was unpacked."""
    faults = read_faults(folder)
    listing = list_pictures(folder, may_be_empty=bool(faults))
    return ShardListing(tuple(listing.pictures), listing.skipped, faults)


def read_listing(path: Path) -> ShardListing | None:
    """Return what was written to ``path``; None if there is nothing, or it is damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        pictures = (PictureFile(name, size, 0, text) for name, size, text in values["pictures"])
        return ShardListing(tuple(pictures), dict(values["skipped"]), dict(values["faults"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def joined(folder: Path, shards: Iterable[ShardListing]) -> Listing:
    """Return ``shards`` as they are listed if all of them are unpacked in ``folder``."""
    pictures, skipped, faults = list[PictureFile](), dict[str, str](), dict[str, str]()
    for shard in shards:
        pictures += shard.pictures
        skipped |= shard.skipped
        faults |= shard.faults
    pictures.sort(key=lambda each: in_order(each.name))
    reasons = dict(sorted(skipped.items())) | dict(sorted(faults.items()))
    return Listing(folder, pictures, reasons, is_streamed=True)
