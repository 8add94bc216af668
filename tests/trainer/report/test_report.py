"""Reporting: records after a resume, the endpoint, the clock, the step line, the messages at the end."""

from __future__ import annotations

import io
import json
import math
import re
import socket
import struct
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from prometheus_client import CollectorRegistry
from tests.trainer.data.formats.encoded_sets import sample
from tests.trainer.report.served import get, served

from fluxtrain.contract.process import ENV_TERMINATION_MESSAGE
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.formats.arrow import SCHEMA, to_batch
from fluxtrain.data.formats.convert import open_encoded
from fluxtrain.data.order import Order
from fluxtrain.errors import ConfigError, DataError, JoinedDataError, one_line
from fluxtrain.mlperf.log_lines import read_lines
from fluxtrain.mlperf.rcp import reference_band, reference_point
from fluxtrain.rendezvous.http_server import host_port
from fluxtrain.report.console import Console, duration
from fluxtrain.report.curve import draw_losses, save_loss_curve
from fluxtrain.report.endpoint import serve
from fluxtrain.report.metrics import STEP_METRICS, Clock, LoggedStep, Metrics
from fluxtrain.report.progress import MAX_BYTES, write_progress, write_termination_log
from fluxtrain.report.records import Records, losses, read_records, smoothed
from fluxtrain.report.run_logs import Convergence
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.progress import Progress


def test_no_step_is_repeated_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = Records(path, 0)
    for step in (10, 20, 30):
        records.write({"step": step, "train_loss": 1.0})
    records.close()
    torn = b'\xff\x00\n{"step": 40, "trai'  # by a power cut
    path.write_bytes(path.read_bytes() + torn)
    resumed = Records(path, 20)
    resumed.write({"step": 30, "train_loss": 0.5})
    resumed.close()
    assert [record["step"] for record in read_records(path)] == [10, 20, 30]
    assert read_records(path)[-1]["train_loss"] == 0.5


def test_the_endpoint_serves_metrics_and_progress() -> None:
    progress = Progress()
    metrics = Metrics(progress)
    metrics.of_step["step"].set(7)
    progress.update(step=7)
    with served(progress, registry=metrics.registry) as port:
        assert "fluxtrain_step 7.0" in get(port, "/metrics")
        assert 'fluxtrain_phase_seconds_total{phase="import"} ' in get(port, "/metrics")
        assert json.loads(get(port, "/progress"))["step"] == 7
        with pytest.raises(urllib.error.HTTPError) as missing:
            get(port, "/etc/passwd")
        missing.value.close()


@pytest.mark.parametrize(
    "request_text", [b"GET /metrics HTTP/1.1\r\n\r\n", b"GET /no HTTP/1.0\r\n\r\n", b""]
)
def test_clients_that_hang_up_print_nothing(
    request_text: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with served() as port:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                # a reset instead of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(request_text)
        assert get(port, "/healthz") == "ok\n"
    assert capfd.readouterr() == ("", "")


def test_a_gauge_has_no_sample_before_it_is_set() -> None:
    metrics = Metrics()
    assert metrics.registry.get_sample_value("fluxtrain_samples") is None
    metrics.of_step["samples"].set(0)
    assert metrics.registry.get_sample_value("fluxtrain_samples") == 0


def test_every_metric_has_the_prefix_and_a_help_text() -> None:
    for family in Metrics().registry.collect():
        assert family.name.startswith("fluxtrain_")
        assert family.documentation.endswith(".")


def test_a_requested_port_in_use_is_an_error() -> None:
    with (
        served() as port,
        pytest.raises(ConfigError, match=r"spec\.run\.logging\.metrics_port: got \d+; cannot"),
    ):
        serve(CollectorRegistry(), Progress(), "127.0.0.1", port)


@pytest.mark.parametrize(
    ("address", "reached"),
    [("::1", ["::1", "127.0.0.1"]), ("127.0.0.1", ["127.0.0.1"]), ("::", ["::1", "127.0.0.1"])],
)
def test_a_port_is_reached_by_ipv4_and_ipv6(address: str, reached: list[str]) -> None:
    """A pod has the loopback address in addition, for ``kubectl port-forward``."""
    with served(address=address) as port:
        for host in reached:
            assert get(port, "/healthz", host) == "ok\n"
        with pytest.raises(ConfigError, match=rf"on {re.escape(host_port(address, port))} \("):
            serve(CollectorRegistry(), Progress(), address, port)


def test_clients_that_send_slowly_keep_nobody_out() -> None:
    clients = list[socket.socket]()
    with ExitStack() as stack:
        port = stack.enter_context(served())
        for _ in range(100):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
            for other in clients:
                with suppress(OSError):
                    other.sendall(b"A: b\r\n")
            clients.append(client)
        assert get(port, "/healthz") == "ok\n"


def test_the_lines_of_a_request_are_bounded_together() -> None:
    with served() as port, socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nA: " + b"b" * 20_000 + b"\r\n\r\n")
        assert b" 431 " in client.recv(1000)


def test_port_zero_serves_nothing() -> None:
    assert serve(CollectorRegistry(), Progress(), "127.0.0.1", 0) is None


def test_the_clock_does_not_count_pauses() -> None:
    now = [0.0]
    clock = Clock(now=lambda: now[0])
    clock.start(100.0)
    now[0] = 5.0
    clock.pause()
    now[0] = 50.0
    clock.resume()
    now[0] = 52.0
    assert clock.seconds == 107.0


def logged(
    step: int,
    loss: float = 1.0,
    rate: float = 1e-3,
    norm: float = 0.5,
    samples_per_second: float = 20.0,
    tflops: float = 0.01,
    mfu: float | None = None,
    allocated: int = 0,
    reserved: int | None = None,
    remaining: float = 60.0,
) -> LoggedStep:
    speed = samples_per_second, tflops, mfu, "unknown", allocated, reserved
    return LoggedStep(step, 8 * step, loss, norm, rate, *speed, 1.0, 0.0, remaining)


def test_step_lines_are_aligned() -> None:
    stream = io.StringIO()
    console = Console(1500, 0, stream)
    slow = {"samples_per_second": 99.5, "remaining": 3725.0, "tflops": 1.25, "mfu": 0.05}
    fast = {"samples_per_second": 1234.56, "remaining": 0.0, "tflops": 676.3, "mfu": 0.516}
    memory = {"allocated": 3 << 30, "reserved": 4 << 30}
    console.step_line(logged(10, 1.41234, 2e-3, 0.7, **slow, **memory))
    console.step_line(logged(1500, 0.4, 1e-8, 123.4, **fast, **memory))
    one, two = stream.getvalue().splitlines()
    for part in ("samples/s", "TFLOP/s", "MFU", "GiB"):
        assert one.index(part) == two.index(part), part
    assert "676 TFLOP/s  MFU 51.6%  3.0 of 4.0 GiB" in two
    assert one.split()[:4] == ["step", "10/1500", "loss", "1.41234"]
    assert one.endswith("1:02:05 left")
    assert duration(-1) == "0:00:00"


def test_a_step_line_has_the_epoch_of_a_run_on_pictures() -> None:
    stream = io.StringIO()
    console = Console(30, 0, stream)
    console.epochs = Order(0, 10, 4).epochs
    for step in (1, 3, 4, 30):
        console.step_line(logged(step))
    lines = [line.split()[2:4] for line in stream.getvalue().splitlines()]
    assert lines == [["epoch", text] for text in ("1/12", "1/12", "2/12", "12/12")]


def test_a_step_line_without_a_known_peak_has_no_mfu() -> None:
    stream = io.StringIO()
    Console(10, 0, stream).step_line(logged(1, tflops=0.0123, allocated=1 << 29))
    assert stream.getvalue().endswith(" 0.0123 TFLOP/s  0.5 GiB  0:01:00 left\n")


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [8],
        [8, 16],
        range(32, 3520, 32),
        [step for step in range(200) if step % 7 and not 50 < step < 90],
        [*range(16, 1600, 16), *range(1600, 200_000, 1600)],
        [2**step for step in range(24)],
    ],
    ids=["none", "one", "two", "even", "gaps", "resumed with another interval", "log-spaced"],
)
def test_the_smoothed_line_of_a_straight_one_lies_on_it(samples: Sequence[int]) -> None:
    line = [(float(at), 2.0e7 - 0.5 * at) for at in samples]
    assert smoothed(line) == [(at, pytest.approx(loss, rel=1e-9)) for at, loss in line]


def test_the_smoothed_line_is_smoother_and_above_as_often_as_below() -> None:
    random = Random(1)
    raw = [(32.0 * step, 0.5 + 1.5 / step + random.gauss(0, 0.05)) for step in range(1, 401)]
    smooth = smoothed(raw)
    above = sum(mean > loss for (_, mean), (_, loss) in zip(smooth, raw, strict=True))
    assert 0.4 < above / len(raw) < 0.6
    jumps, smooth_jumps = (
        sum(abs(b - a) for (_, a), (_, b) in pairwise(points[50:])) for points in (raw, smooth)
    )
    assert smooth_jumps < jumps / 8


def test_losses_that_cannot_be_drawn_are_left_out() -> None:
    given = [0.9, None, float("nan"), float("inf"), 0.0, -1.0, 0.4, 0.3]
    records = [
        {"step": 0, "samples": 0, "eval_loss": 1.0},
        *({"step": at, "samples": at, "train_loss": loss} for at, loss in enumerate(given, 1)),
        {"step": 8, "samples": 8, "train_loss": 0.2},
    ]
    assert losses(records, "train_loss") == [(1, 0.9), (7, 0.4), (8, 0.3), (8, 0.2)]
    assert smoothed(losses(records, "train_loss")) == [
        (1, 0.9),
        (7, pytest.approx(0.4, abs=0.03)),
        (8, 0.2),
    ]


@pytest.fixture
def axes() -> Iterator[Axes]:
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def test_the_loss_curve_has_both_lines_of_the_training(axes: Axes) -> None:
    records = [{"samples": 32 * step, "train_loss": 2.0 - step / 100} for step in range(110)]
    draw_losses(axes, records, None, None)
    raw, smooth = (line.get_xydata() for line in axes.lines)
    assert smooth == pytest.approx(raw)


def test_the_only_point_of_a_loss_curve_is_drawn(axes: Axes) -> None:
    draw_losses(axes, [{"samples": 32, "train_loss": 2.0}], None, None)
    assert axes.lines[-1].get_marker() == "o"


@pytest.mark.parametrize("values", [(0.9, 0.5), (0.6, 0.58), (3.0, 0.4), (50.0, 0.1)])
def test_a_loss_curve_has_plain_numbers_inside_its_frame(
    values: tuple[float, float], axes: Axes
) -> None:
    records = [{"samples": 32 * at, "eval_loss": loss} for at, loss in enumerate(values)]
    draw_losses(axes, records, None, None)
    axes.figure.canvas.draw()
    low, high = axes.get_ylim()
    shown = [
        label.get_text()
        for label in axes.get_yticklabels(which="both")
        if low <= label.get_position()[1] <= high and label.get_text()
    ]
    assert len(shown) >= 2
    assert all(0 < float(text) < 100 for text in shown), shown
    (value,) = axes.texts
    frame, place = axes.get_window_extent(), value.get_window_extent()
    assert frame.x0 <= place.x0
    assert place.x1 <= frame.x1


def test_the_loss_curve_is_a_png(tmp_path: Path) -> None:
    records = [{"step": s, "samples": s * 32, "train_loss": 2.0 / s} for s in range(1, 50)]
    records.append({"step": 49, "samples": 1568, "eval_loss": 0.4})
    save_loss_curve(tmp_path / "loss.png", records, 0.586)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "loss.png"]


def test_a_metric_of_steps_has_the_same_name_once_everywhere() -> None:
    for column in ("name", "gauge", "progress"):
        names = [getattr(each, column) for each in STEP_METRICS if getattr(each, column)]
        assert len(names) == len(set(names))
    for each in STEP_METRICS:
        assert not each.gauge or each.text, "a gauge has a text"
        assert each.curve is None or (each.gauge and each.group), "a curve is of a gauge"


def write_file(folder: Path, **progress: object) -> None:
    """Write ``progress`` as a trainer does."""
    values = Progress()
    values.update(**progress)
    write_progress(values, {ENV_TERMINATION_MESSAGE: str(folder / "progress.json")})


def forwarded(folder: Path, message: str) -> dict[str, object]:
    """Return the content of the termination log."""
    log = folder / "termination-log"
    log.touch()
    write_termination_log(folder / "progress.json", message, 3, log)
    content: dict[str, object] = json.loads(log.read_bytes())
    return content


def test_progress_and_message_are_forwarded(tmp_path: Path) -> None:
    write_file(tmp_path, rank=0, step=300, trainLoss=0.5)
    progress = {"phase": "import", "rank": 0, "step": 300, "trainLoss": 0.5}
    content = forwarded(tmp_path, "the loss is nan")
    assert content.items() >= {**progress, "message": "the loss is nan"}.items()
    assert "message" not in forwarded(tmp_path, "")


def test_nothing_is_written_without_a_file_to_write_to(tmp_path: Path) -> None:
    write_progress(Progress(), {})
    write_progress(Progress(), {ENV_TERMINATION_MESSAGE: str(tmp_path / "no" / "such" / "folder")})
    write_termination_log(tmp_path / "progress.json", "a message", 3, tmp_path / "termination-log")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, "", '{"step": 3', "[1]", "\x00"])
def test_the_message_is_forwarded_without_valid_progress(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "progress.json").write_text(content)
    assert forwarded(tmp_path, "killed") == {"message": "killed", "processRestarts": 3}


@pytest.mark.parametrize("character", ["x", "é", "\n", '"', "\udc80", "火"])
def test_the_end_of_a_long_message_is_kept(tmp_path: Path, character: str) -> None:
    write_file(tmp_path, rank=0, step=2**31)
    content = forwarded(tmp_path, character * 9000 + "\nRuntimeError: why")
    assert (tmp_path / "termination-log").stat().st_size <= MAX_BYTES
    assert str(content["message"]).endswith("\nRuntimeError: why")
    assert content["step"] == 2**31


LINE = ':::MLLOG {"time_ms": 1, "key": "eval_accuracy", "value": 0.1, "metadata": {}}'


def lines_in(folder: Path, text: str) -> list[str]:
    """Return the MLPerf lines in ``text``, as MLCommons' parser finds them."""
    (folder / "log").write_text(text)
    return [line.text for line in read_lines(folder / "log")]


@pytest.mark.parametrize(
    "text", [f"a\n{LINE}", f"a\r{LINE}\r", f"a\u2028{LINE}", LINE, f"\x1b[2K{LINE}"]
)
def test_an_error_with_a_strangers_name_is_one_line_without_the_token(
    tmp_path: Path, text: str
) -> None:
    for error in (DataError(text), ConfigError(text, text, text), JoinedDataError([text])):
        assert str(error).isprintable()
        assert lines_in(tmp_path, str(error)) == []
    assert "eval_accuracy" in one_line(text)


def test_a_column_with_a_line_break_injects_nothing(tmp_path: Path) -> None:
    schema = pa.schema(
        [("mean", pa.struct([(f"x\n{LINE}\n", pa.int8())])), (f"\n{LINE}\n", pa.int8())]
    )
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), schema) as file:
        file.write_table(schema.empty_table())
    with pytest.raises(DataError) as caught:
        open_encoded(tmp_path, "arrow")
    assert lines_in(tmp_path, str(caught.value)) == []


def test_a_key_with_the_token_injects_nothing(tmp_path: Path) -> None:
    batch = to_batch([sample(0)], SCHEMA)
    keys = pa.array([LINE])
    batch = pa.record_batch([keys, *batch.columns[1:]], schema=SCHEMA)
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), SCHEMA) as file:
        file.write_batch(batch)
    name = open_encoded(tmp_path, "arrow").name(0)
    assert lines_in(tmp_path, one_line(f"skipped an unreadable sample: {name}")) == []


def test_a_link_at_the_name_of_a_partial_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "a.partial").symlink_to(victim)
    with atomic_write(tmp_path / "a.json") as partial:
        partial.write_text("new")
    assert victim.read_text() == "kept"
    assert (tmp_path / "a.json").read_text() == "new"
    assert not (tmp_path / "a.json").is_symlink()


def test_the_band_of_the_reference_is_in_the_loss_curve(axes: Axes) -> None:
    records = [{"step": 1, "samples": 262_144, "eval_loss": 1.2}]
    band = reference_band(resolve({"preset": "mlperf-schnell"}))
    point = reference_point(512, "6.1.0")
    assert point is not None
    assert band == point.band
    draw_losses(axes, records, 0.586, band)
    (patch,) = axes.patches
    assert (patch.get_x(), patch.get_x() + patch.get_width()) == pytest.approx(band)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "MLPerf's reference reaches the target (95 %)" in texts


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
