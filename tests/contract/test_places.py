"""Places of nodes as one argument: their order is kept, names are not told, anything else is refused."""

from __future__ import annotations

import pytest

from fluxtrain.contract.process import MAX_BYTES, place_of, read_places, write_places


@pytest.mark.parametrize(
    ("places", "numbers"),
    [
        ({}, {"a": None}),
        ({"a": "rack"}, {"a": 0, "b": None, "": None}),
        ({"b": "r1", "a": "r2", "c": "r1"}, {"a": 1, "b": 0, "c": 0}),
        ({"a": "rack-10", "b": "rack-9", "c": "rack-100"}, {"a": 1, "b": 0, "c": 2}),
        ({"a": "", "b": "r2", "c": ""}, {"a": None, "b": 0, "c": None}),
        ({"n" * 253: "R" * 63}, {"n" * 253: 0, "n" * 252: None}),
    ],
)
def test_the_order_of_places_is_kept(
    places: dict[str, str], numbers: dict[str, int | None]
) -> None:
    told = read_places(write_places(places))
    assert {node: place_of(node, told) for node in numbers} == numbers


def test_neither_names_of_nodes_nor_labels_are_told() -> None:
    text = write_places({"secret-node": "secret-rack", "other": "rack;,2"})
    assert text.count(";") == 1
    assert len(text) == 12 + 1 + 12
    assert set(text) <= set("0123456789abcdef;")


@pytest.mark.parametrize("per_place", [1, 32, 10_000])
def test_the_argument_is_bounded_and_keeps_the_first_nodes(per_place: int) -> None:
    nodes = [f"node-{number}" for number in range(30_000)]
    text = write_places({node: f"rack-{n // per_place}" for n, node in enumerate(nodes)})
    told = read_places(text)
    assert MAX_BYTES - 26 < len(text) <= MAX_BYTES
    assert place_of(nodes[len(told) - 1], told) == (len(told) - 1) // per_place
    assert place_of(nodes[len(told)], told) is None


D = "0123456789ab"


@pytest.mark.parametrize(
    "text",
    [
        *("rack", "0123456789a", "0123456789abc", D.upper(), f"{D},", f"{D};", f",{D}", f";{D}"),
        *(f"{D},,{D}", f"{D};;{D}", f"{D} {D}", f"{D}:{D}", f"{D}\n", f"{D}{D}"),
        ",".join([D] * MAX_BYTES),
    ],
)
def test_other_arguments_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be at most"):
        read_places(text)
