"""CI's test run fails if a test was skipped: what a machine lacks is installed, or reported as a failure."""

from __future__ import annotations

import pytest
from tests.paths import ROOT

pytest_plugins = ["pytester"]

PASSES = "def test_passes(): pass\n"
SKIPS = "import pytest\ndef test_skips(): pytest.skip('a program is missing')\n"
SKIPS_WHOLE = "import pytest\npytest.skip('a program is missing', allow_module_level=True)\n"
FAILS = "def test_fails(): assert False\n"


@pytest.mark.parametrize(
    ("texts", "options", "code"),
    [
        ([PASSES], ["--fail-on-skip"], 0),
        ([PASSES, SKIPS], ["--fail-on-skip"], 1),
        ([PASSES, SKIPS_WHOLE], ["--fail-on-skip"], 1),
        ([SKIPS, FAILS], ["--fail-on-skip"], 1),
        ([PASSES, SKIPS], [], 0),
    ],
)
def test_a_skipped_test_fails_the_run_that_asks_for_it(
    texts: list[str],
    options: list[str],
    code: int,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing them takes a second
    pytester.makepyfile(**{f"test_{number}": text for number, text in enumerate(texts)})
    assert pytester.runpytest_inprocess("-p", "tests.conftest", *options).ret == code


def test_ci_asks_for_it() -> None:
    assert "--fail-on-skip" in (ROOT / ".ci" / "run").read_text()
