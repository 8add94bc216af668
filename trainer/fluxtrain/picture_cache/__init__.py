"""Encodes a folder of pictures into a cache before training, divided over the ranks.

Pictures and captions are encoded one at a time, so that the bytes of an encoding depend on nothing else: not
on the ranks, on restarts or on the other pictures. No rank waits for another in a collective meanwhile.
"""

from fluxtrain.picture_cache.resumed import check_pictures
from fluxtrain.picture_cache.stage import cache_pictures
from fluxtrain.picture_cache.work import CachedPictures

__all__ = ["CachedPictures", "cache_pictures", "check_pictures"]
