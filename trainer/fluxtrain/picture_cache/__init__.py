"""Encodes a folder of pictures into a cache before training, divided over the ranks.

Pictures and captions are encoded one at a time, so that the bytes of an encoding depend on nothing else: not
on the ranks, on restarts or on the other pictures. No rank waits for another in a collective meanwhile.
"""
