"""Changes of valid inputs, as Hypothesis strategies."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

_NUMBERS = [
    *(0, 1, 7, 127, 128, 255, 256, 2**15, 2**16 - 1),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63),
]
_WORDS = [
    *(b"", b"\0", b"\n", b"\r\n", b":", b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b"[[[["),
    *(b"!!int ''", b"&a", b"*a", b"? ", b"<<: ", b'"', b"'", b"\\u0000", b"\xff\xfe"),
    *(b"\xef\xbb\xbf", b"9" * 30, b"../", b"\x1b[31m", b":::MLLOG ", b"true", b"="),
    *(b"--w ", b"a." * 70),
]


@st.composite
def changed(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """Return one of ``seeds`` after a few changes."""
    content = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(content)))
        length = draw(st.sampled_from([0, 1, 1, 2, 4, 8, 64]))
        content[place : place + length] = draw(_pieces(bytes(content), length))
    return bytes(content)


def _pieces(content: bytes, length: int) -> st.SearchStrategy[bytes]:
    """Return what may replace ``length`` bytes: a number of that size, a word, any bytes, another part."""
    width = length if length in (1, 2, 4, 8) else 4
    numbers = st.sampled_from(_NUMBERS).flatmap(
        lambda n: st.sampled_from(["little", "big"]).map(
            lambda order: (n % (1 << 8 * width)).to_bytes(width, order)  # type: ignore[arg-type]
        )
    )
    parts = st.integers(0, len(content)).map(lambda start: content[start : start + 64])
    return st.one_of(numbers, st.sampled_from(_WORDS), st.binary(max_size=8), parts)
