"""Where a run will reach its target, as a metric and in /progress, and the reference's band in the curve."""

from __future__ import annotations

import math
from typing import Any

import pytest
from matplotlib import pyplot

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.mlperf.rcp import reference_band, reference_point
from fluxtrain.report.curve import draw_losses
from fluxtrain.report.metrics import Metrics
from fluxtrain.report.run_logs import Convergence
from fluxtrain.runtime.progress import Progress


def test_the_band_of_the_reference_is_in_the_loss_curve() -> None:
    records = [{"step": 1, "samples": 262_144, "eval_loss": 1.2}]
    band = reference_band(resolve({"preset": "mlperf-schnell"}))
    point = reference_point(512, "6.1.0")
    assert point is not None
    assert band == point.band
    figure, axes = pyplot.subplots()
    draw_losses(axes, records, 0.586, band)
    (patch,) = axes.patches
    assert (patch.get_x(), patch.get_x() + patch.get_width()) == pytest.approx(band)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "MLPerf's reference reaches the target (95 %)" in texts
    pyplot.close(figure)


@pytest.mark.parametrize(
    "run",
    [
        {"preset": "micro"},
        {"preset": "mlperf-schnell", "task": "benchmark"},
        {
            "preset": "mlperf-schnell",
            "schedule": {"global_batch_size": 8192},
            "logging": {"mlperf": {"division": "open"}},
        },
    ],
)
def test_other_runs_have_no_band(run: dict[str, Any]) -> None:
    assert reference_band(resolve(run)) is None


def test_the_forecast_is_a_metric_and_in_the_progress() -> None:
    config = resolve({"preset": "mlperf-schnell"})
    metrics, progress, every = Metrics(), Progress(), 262_144
    curve = [(n * every, 1.5 - 0.06 * math.log(n * every)) for n in range(1, 41)]
    records = [{"step": n, "samples": s, "eval_loss": x} for n, (s, x) in enumerate(curve[:2])]
    band = reference_band(config)
    assert band is not None
    convergence = Convergence(config, records, metrics, progress, band)
    samples = {m.name: m.samples for m in metrics.registry.collect()}
    assert math.isnan(samples["fluxtrain_target_samples"][0].value)
    assert samples["fluxtrain_reference_samples_low"][0].value == band[0]
    for point in curve[2:10]:
        convergence.add(*point)
    expected = next(s for s, loss in curve if loss <= 0.586)
    (sample,) = next(
        m.samples for m in metrics.registry.collect() if m.name == "fluxtrain_target_samples"
    )
    assert sample.value == expected
    assert progress.read()["targetSamples"] == expected
