"""Reporting: records after a resume, the endpoint, the clock, the step line."""

import io
import json
import re
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from matplotlib import pyplot
from prometheus_client import CollectorRegistry

from fluxtrain.data.order import Order
from fluxtrain.errors import ConfigError
from fluxtrain.rendezvous.http_server import host_port
from fluxtrain.report.console import Console, duration
from fluxtrain.report.curve import draw_losses, save_loss_curve
from fluxtrain.report.endpoint import serve
from fluxtrain.report.metrics import STEP_METRICS, Clock, LoggedStep, Metrics
from fluxtrain.report.records import Records, losses, read_records, smoothed
from fluxtrain.runtime.progress import Progress


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
        return str(response.read().decode())


def test_no_step_is_repeated_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = Records(path, 0)
    for step in (10, 20, 30):
        records.write({"step": step, "train_loss": 1.0})
    records.close()
    path.write_text(path.read_text() + '{"step": 40, "trai')  # killed while writing
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
    stop = serve(metrics.registry, progress, "127.0.0.1", None)
    assert stop is not None
    port = progress.read()["port"]
    try:
        assert "fluxtrain_step 7.0" in get(port, "/metrics")
        assert 'fluxtrain_phase_seconds_total{phase="import"} ' in get(port, "/metrics")
        assert json.loads(get(port, "/progress"))["step"] == 7
        with pytest.raises(urllib.error.HTTPError) as missing:
            get(port, "/etc/passwd")
        missing.value.close()
    finally:
        stop()


@pytest.mark.parametrize(
    "request_text", [b"GET /metrics HTTP/1.1\r\n\r\n", b"GET /no HTTP/1.0\r\n\r\n", b""]
)
def test_clients_that_hang_up_print_nothing(
    request_text: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    progress = Progress()
    stop = serve(CollectorRegistry(), progress, "127.0.0.1", None)
    assert stop is not None
    address = ("127.0.0.1", int(progress.read()["port"]))
    for _ in range(20):
        with socket.create_connection(address) as connection:
            # a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(request_text)
    assert get(address[1], "/healthz") == "ok\n"
    stop()
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
    progress = Progress()
    stop = serve(CollectorRegistry(), progress, "127.0.0.1", None)
    assert stop is not None
    try:
        with pytest.raises(ConfigError, match=r"spec\.run\.logging\.metrics_port: got \d+; cannot"):
            serve(CollectorRegistry(), Progress(), "127.0.0.1", progress.read()["port"])
    finally:
        stop()


@pytest.mark.parametrize(
    ("address", "reached"),
    [("::1", ["::1", "127.0.0.1"]), ("127.0.0.1", ["127.0.0.1"]), ("::", ["::1", "127.0.0.1"])],
)
def test_a_port_is_reached_by_ipv4_and_ipv6(address: str, reached: list[str]) -> None:
    """A pod has the loopback address in addition, for ``kubectl port-forward``."""
    progress = Progress()
    stop = serve(CollectorRegistry(), progress, address, None)
    assert stop is not None
    port = int(progress.read()["port"])
    try:
        for host in reached:
            with urllib.request.urlopen(f"http://{host_port(host, port)}/healthz") as answer:
                assert answer.read() == b"ok\n"
        with pytest.raises(ConfigError, match=rf"on {re.escape(host_port(address, port))} \("):
            serve(CollectorRegistry(), Progress(), address, port)
    finally:
        stop()


def test_clients_that_send_slowly_keep_nobody_out() -> None:
    progress, clients = Progress(), list[socket.socket]()
    stop = serve(CollectorRegistry(), progress, "127.0.0.1", None)
    assert stop is not None
    port = int(progress.read()["port"])
    with ExitStack() as stack:
        stack.callback(stop)
        for _ in range(100):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
            for other in clients:
                with suppress(OSError):
                    other.sendall(b"A: b\r\n")
            clients.append(client)
        assert get(port, "/healthz") == "ok\n"


def test_the_lines_of_a_request_are_bounded_together() -> None:
    progress = Progress()
    stop = serve(CollectorRegistry(), progress, "127.0.0.1", None)
    assert stop is not None
    try:
        address = "127.0.0.1", int(progress.read()["port"])
        with socket.create_connection(address, 30) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nA: " + b"b" * 20_000 + b"\r\n\r\n")
            assert b" 431 " in client.recv(1000)
    finally:
        stop()


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


def test_the_loss_curve_has_both_lines_of_the_training() -> None:
    figure, axes = pyplot.subplots()
    records = [{"samples": 32 * step, "train_loss": 2.0 - step / 100} for step in range(110)]
    draw_losses(axes, records, None, None)
    raw, smooth = (line.get_xydata() for line in axes.lines)
    assert smooth == pytest.approx(raw)
    pyplot.close(figure)


def test_the_only_point_of_a_loss_curve_is_drawn() -> None:
    figure, axes = pyplot.subplots()
    draw_losses(axes, [{"samples": 32, "train_loss": 2.0}], None, None)
    assert axes.lines[-1].get_marker() == "o"
    pyplot.close(figure)


@pytest.mark.parametrize("values", [(0.9, 0.5), (0.6, 0.58), (3.0, 0.4), (50.0, 0.1)])
def test_a_loss_curve_has_plain_numbers_inside_its_frame(values: tuple[float, float]) -> None:
    figure, axes = pyplot.subplots()
    records = [{"samples": 32 * at, "eval_loss": loss} for at, loss in enumerate(values)]
    draw_losses(axes, records, None, None)
    figure.canvas.draw()
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
    pyplot.close(figure)


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
