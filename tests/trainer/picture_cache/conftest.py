"""Models that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.tiny_encoders import write_encoders


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a models root with tiny encoders."""
    return write_encoders(tmp_path_factory.mktemp("models"))
