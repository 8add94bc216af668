"""The submitter's part of the configuration."""

from __future__ import annotations

from typing import Literal

from fluxtrain.contract.strict_model import Label, StrictModel


class MLPerfConfig(StrictModel):
    """Submitter's entries of the MLPerf log."""

    organization: Label = "example-org"
    """submission_org of the MLPerf log."""
    platform: Label = "example-platform"
    """submission_platform of the MLPerf log."""
    division: Literal["closed", "open", "auto"] = "open"
    """submission_division of the MLPerf log. ``closed`` is possible with the presets ``mlperf-*`` only, which
    have it; what breaks a rule is refused, or ends the run. With ``auto`` the run is closed as long as no
    rule is broken; the log says which one made it open."""
    status: Literal["onprem", "cloud", "preview", "research"] = "onprem"
    """submission_status of the MLPerf log."""
