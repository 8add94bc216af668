"""Event files, read with TensorBoard's own reader, hold what metrics.jsonl holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.trainer.report.sinks.runs import CRASH_STEP, points, train

from fluxtrain.report.sinks import IMAGES, TensorBoardSink

pytestmark = pytest.mark.slow
ON = {"tensorboard": True}


def read(output: Path) -> EventAccumulator:
    events = EventAccumulator(str(output / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return events


def scalars_in(output: Path) -> dict[str, list[tuple[int, float]]]:
    events = read(output)
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def assert_equal(output: Path) -> None:
    found, expected = scalars_in(output), points(output)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert [step for step, _ in found[name]] == [samples for samples, _ in values], name
        assert [value for _, value in found[name]] == pytest.approx([v for _, v in values]), name


def test_a_crash_neither_repeats_nor_loses_steps_and_the_number_of_ranks_may_change(
    tmp_path: Path,
) -> None:
    train(tmp_path, ON, crash=CRASH_STEP)
    lost = max(samples for samples, _ in scalars_in(tmp_path)["loss/train_loss"])
    assert lost > 8 * 16, "it was ahead of the checkpoint"
    train(tmp_path, ON, size=2)
    assert_equal(tmp_path)
    steps = [samples for samples, _ in scalars_in(tmp_path)["loss/train_loss"]]
    assert steps == [16 * step for step in range(1, 21)]
    assert [samples for samples, _ in scalars_in(tmp_path)["loss/eval_loss"]] == [
        0,
        80,
        160,
        240,
        320,
    ]
    names = scalars_in(tmp_path)
    assert {"optimizer/grad_norm", "optimizer/learning_rate", "memory/memory_allocated_bytes"} <= {
        *names
    }
    assert {"speed/samples_per_second", "speed/tflops_per_gpu", "eval_loss_by_timestep/7_of_8"} <= {
        *names
    }


def test_switched_on_later_it_gets_the_earlier_steps_too(tmp_path: Path) -> None:
    train(tmp_path, {}, crash=CRASH_STEP)
    train(tmp_path, ON)
    assert_equal(tmp_path)


def test_sample_images_are_shown_at_their_samples(tmp_path: Path) -> None:
    image = tmp_path / "step_0000002.png"
    Image.new("RGB", (6, 4), (255, 0, 0)).save(image)
    sink = TensorBoardSink(tmp_path / "tensorboard", 0)
    sink.show(32, image)
    sink.close()
    (event,) = read(tmp_path).Images(IMAGES)
    assert (event.step, event.width, event.height) == (32, 6, 4)
