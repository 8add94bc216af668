"""Options of the operator: from the command line, from the environment, and bad ones refused."""

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
    words = [IMAGE, "--supplemental-group=44", "--supplemental-group", "109"]
    assert parse(words).supplemental_groups == (44, 109)


@pytest.mark.parametrize("text", ["render", "-1", "4.5", "2147483648", "44,,x"])
def test_what_is_no_group_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setenv(GROUPS, text)
    with pytest.raises(SystemExit) as ended:
        parse([IMAGE])
    assert ended.value.code == 2
    assert "is no group id" in capsys.readouterr().err
