"""The operator's options come from command line and environment, and are validated."""

from __future__ import annotations

import pytest

from fluxtrain_operator.options import parse

IMAGE = "--image=example.org/trainer:1"
GROUPS = "FLUXTRAIN_SUPPLEMENTAL_GROUPS"
LOG_FORMAT = "FLUXTRAIN_LOG_FORMAT"


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


@pytest.mark.parametrize(
    ("variable", "option", "log_format"),
    [(None, [], "json"), ("text", [], "text"), ("text", ["--log-format=json"], "json")],
)
def test_the_log_format_comes_from_command_line_or_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, option: list[str], log_format: str
) -> None:
    monkeypatch.delenv(LOG_FORMAT, raising=False)
    if variable is not None:
        monkeypatch.setenv(LOG_FORMAT, variable)
    assert parse([IMAGE, *option]).log_format == log_format


def test_an_unknown_log_format_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LOG_FORMAT, "xml")
    with pytest.raises(SystemExit) as error:
        parse([IMAGE])
    assert error.value.code == 2
    assert "FLUXTRAIN_LOG_FORMAT: got 'xml'; must be json or text" in capsys.readouterr().err
