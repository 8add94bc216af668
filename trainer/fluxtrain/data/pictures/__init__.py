"""Folders of pictures with captions: found, decoded, and read from a cache of their encodings."""
