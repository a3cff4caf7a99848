"""`calibrate`: what is made of measurements, the line and the file that `gpu=` takes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from errors import message

import autotp
from autotp.costs.hardware import GIB, KINDS, NUMBERS, hardware_of
from autotp.tools.estimation.calibrate import compared
from autotp.tools.estimation.seconds.measure_device import Measured
from autotp.tools.estimation.seconds.measure_links import MeasuredLink

CPU, H100 = KINDS["cpu-gloo"], KINDS["h100-80gb"]
AS_KNOWN = Measured(
    half=CPU.matrix_flops, single=CPU.vector_flops, double=CPU.vector_flops / 2, square=CPU.vector_flops,
    short=CPU.vector_flops,
    copy=CPU.memory_bandwidth, add=CPU.memory_bandwidth, call=CPU.launch, memory=CPU.memory,
)  # fmt: skip
LINK = MeasuredLink(ranks=2, bandwidth=CPU.node_bandwidth, latency=CPU.latency)


def test_a_device_like_the_known_one_differs_nowhere() -> None:
    found = compared(CPU, AS_KNOWN, LINK, None)
    assert found.differing == () and found.ranks == 2
    assert {n: getattr(found.device, n) for n in NUMBERS} == pytest.approx({n: getattr(CPU, n) for n in NUMBERS})
    assert "0 of 9 numbers differ by more than 10%" in str(found)


def test_it_says_where_the_device_differs() -> None:
    slow = replace(AS_KNOWN, single=AS_KNOWN.single / 2, copy=AS_KNOWN.copy * 1.09)
    found = compared(CPU, slow, replace(LINK, latency=2 * LINK.latency), None)
    assert [number.name for number in found.differing] == ["products, float32", "latency in a node"]
    (row,) = (line for line in str(found).splitlines() if line.startswith("products, float32"))
    assert row.split()[-2:] == ["-50%", "differs"]
    assert found.device.vector_flops == CPU.vector_flops / 2 and found.device.latency == 2 * CPU.latency


def test_the_page_shows_what_is_printed_of_its_numbers() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "estimate.md").read_text()
    shown = page.partition("```\nautotp calibrate --save device.json\n```\n\n```\n")[2].partition("```")[0]
    found = replace(
        AS_KNOWN, half=0.517e12, single=0.1122e12, double=0.05675e12, copy=54.57e9, add=50.51e9, call=21.002e-6,
        memory=11.77 * GIB,
    )  # fmt: skip
    assert f"{compared(CPU, found, MeasuredLink(ranks=2, bandwidth=3.06e9, latency=70.1e-6), None)}\n" == shown


def test_a_gpu_keeps_the_sustained_parts_of_its_kind() -> None:
    """So the line has the peak of a data sheet, and an estimate comes to what was measured."""
    half, copy = H100.matrix_flops * H100.matrix_sustained, H100.memory_bandwidth * H100.memory_sustained
    near, far = (
        MeasuredLink(ranks=8, bandwidth=300e9, latency=6e-6),
        MeasuredLink(ranks=4, bandwidth=25e9, latency=9e-6),
    )
    found = compared(H100, replace(AS_KNOWN, half=half, copy=copy, memory=80 * GIB), near, far)
    assert found.device.matrix_flops == pytest.approx(H100.matrix_flops)
    assert (found.device.node, found.device.net_bandwidth) == (8, pytest.approx(25e9 / 0.78))
    assert found.line() == "989TF 3350GB/s 80GiB node=8x385GB/s net=32.1GB/s like=h100-80gb" and found.ranks == 32


def test_links_that_were_not_measured_are_those_of_the_kind() -> None:
    found = compared(H100, AS_KNOWN, None, None)
    assert (found.device.node_bandwidth, found.device.net_bandwidth) == (450e9, 50e9)
    assert found.ranks == 1 and "links        not measured" in str(found)


def test_the_line_and_the_file_are_devices(tmp_path: Path) -> None:
    found = compared(CPU, replace(AS_KNOWN, copy=71.23e9), LINK, None)
    line = hardware_of(found.line())
    assert line.memory_bandwidth == 71.2e9 and line.launch == CPU.launch and not line.is_gpu
    found.save(tmp_path / "device.json")
    assert hardware_of(str(tmp_path / "device.json")) == found.device
    assert [file.name for file in tmp_path.iterdir()] == ["device.json"]


def test_calibration_is_plain_data() -> None:
    data = json.loads(json.dumps(compared(CPU, AS_KNOWN, LINK, None).to_dict()))
    assert data["known"]["name"] == "cpu-gloo" and set(data["device"]) == {"name", *NUMBERS}
    assert data["line"].endswith("like=cpu-gloo")
    assert len(data["numbers"]) == 9 and data["numbers"][0]["differs"] is False


def test_calibrate_measures_this_machine() -> None:
    found = autotp.calibrate(seconds=1)
    assert found.ranks == 2 and found.known is CPU
    assert all(number.measured > 0 for number in found.numbers)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gpu": "a1000"}, "gpu='a1000' is not known"),
        ({"gpu": "h100-80gb"}, "gpu='h100-80gb', and this process has a CPU\n  try      gpu=None"),
        ({"seconds": 0}, "seconds=0 is no time\n  try      seconds=40"),
        ({"seconds": "1"}, "seconds is '1'"),
    ],
)
def test_calibrate_refuses_wrong_arguments(given: dict[str, object], expected: str) -> None:
    assert message(lambda: autotp.calibrate(**given)).startswith(f"calibrate: {expected}")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("device.txt", "does not end in .json, by which gpu= knows a file\n  try      device.json"),
        ("no/such/device.json", "does not exist\n  try      device.json"),
    ],
)
def test_calibration_says_where_it_cannot_be_saved(tmp_path: Path, name: str, expected: str) -> None:
    found = compared(CPU, AS_KNOWN, LINK, None)
    assert message(lambda: found.save(tmp_path / name)).endswith(expected)
