"""The mark by which a contact sheet that was drawn of pictures is told from the pictures."""

from __future__ import annotations

from pathlib import Path

FILE = "contact-sheet.png"
"""Name of a contact sheet, if no other is given; in a folder of pictures it must have this one."""
MARK = ("Software", "fluxtrain contact sheet")
"""Text field of the PNG."""
_HEAD_BYTES = 1024


def is_contact_sheet(path: Path) -> bool:
    """Return whether the file ``path`` has the MARK; nothing is decoded.

    Raises OSError if it is unreadable.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    chunk = b"tEXt" + "\0".join(MARK).encode()
    return head.startswith(b"\x89PNG\r\n\x1a\n") and chunk in head


def is_sheet_among_pictures(path: Path) -> bool:
    """Return whether ``path``, a file of a folder of pictures, is a contact sheet, and no picture.

    Only files of the usual name are opened.
    """
    try:
        return path.name == FILE and is_contact_sheet(path)
    except OSError:  # whoever lists it says what is wrong
        return False
