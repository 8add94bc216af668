"""The factor of adapters' updates: refused where it is no usable number, before anything is read."""

from __future__ import annotations

import pytest

from fluxtrain.cli import main

MERGE = ("adapter", "merge", "weights", "lora", "--output", "merged")
SAMPLE = ("sample", "weights", "--adapter", "lora")


@pytest.mark.parametrize("command", [MERGE, SAMPLE])
@pytest.mark.parametrize("value", ["nan", "inf", "1e39", "-1000.5", "strong"])
def test_a_strength_that_is_no_usable_number_is_refused(
    command: tuple[str, ...], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main([*command, "--strength", value])
    assert exited.value.code == 2
    expected = f"--strength: got '{value}'; must be a number from -1000 to 1000"
    assert expected in capsys.readouterr().err
