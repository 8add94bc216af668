"""The operator's options come from command line and environment, and are validated."""

from __future__ import annotations

import pytest

from fluxtrain_operator.options import parse

IMAGE = "--image=example.org/trainer:1"
GROUPS = "FLUXTRAIN_SUPPLEMENTAL_GROUPS"


@pytest.mark.parametrize(
    ("text", "groups"), [("", ()), ("44", (44,)), ("44,109,2147483647", (44, 109, 2**31 - 1))]
)
def test_groups_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, groups: tuple[int, ...]
) -> None:
    monkeypatch.setenv(GROUPS, text)
    assert parse([IMAGE]).supplemental_groups == groups


def test_groups_come_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GROUPS, raising=False)
    arguments = [IMAGE, "--supplemental-group=44", "--supplemental-group", "109"]
    assert parse(arguments).supplemental_groups == (44, 109)


@pytest.mark.parametrize("text", ["render", "-1", "4.5", "2147483648", "44,,x"])
def test_an_invalid_group_id_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setenv(GROUPS, text)
    with pytest.raises(SystemExit) as error:
        parse([IMAGE])
    assert error.value.code == 2
    assert "is not a group id" in capsys.readouterr().err
