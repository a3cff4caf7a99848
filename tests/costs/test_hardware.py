"""Kinds of devices, and lines that describe one's own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autotp
from autotp.costs.hardware import GIB, KINDS, LINE, Hardware, hardware_of, to_file


def test_a_kind_is_found_by_name() -> None:
    assert hardware_of("A100_80GB") is KINDS["a100-80gb"] and hardware_of("h100-80gb").memory == 80 * GIB


def test_a_line_describes_a_device() -> None:
    found = hardware_of("312TF 2TB/s 80GiB node=4x300GB/s net=25GB/s")
    assert (found.matrix_flops, found.memory_bandwidth, found.memory) == (312e12, 2e12, 80 * GIB)
    assert (found.node, found.node_bandwidth, found.net_bandwidth) == (4, 300e9, 25e9)


def test_a_line_says_what_kind_it_is_like() -> None:
    found = hardware_of("1TF 60GB/s 16GB node=4x1GB/s net=1GB/s like=cpu-gloo")
    known = KINDS["cpu-gloo"]
    assert not found.is_gpu and found.launch == known.launch and found.vector_flops == 2 * known.vector_flops


def test_a_file_has_all_numbers(tmp_path: Path) -> None:
    device = replace(KINDS["v100-32gb"], name="mine", fill=0.0)
    to_file(device, tmp_path / "mine.JSON")
    assert hardware_of(str(tmp_path / "mine.JSON")) == device


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ("{", "is no JSON"),
        ("[]", "is no file of a device, version 1"),
        ({"version": 2}, "is no file of a device, version 1"),
        ({"name": 3}, "is no file of a device, version 1"),
        ({"launch": None}, "`launch` is missing, unknown or no positive number"),
        ({"more": 1.0}, "`more` is missing, unknown or no positive number"),
        ({"launch": "1"}, "`launch` is missing, unknown or no positive number"),
        ({"latency": 0}, "`latency` is missing, unknown or no positive number"),
        ({"node": 1.5}, "`node` is missing, unknown or no positive number"),
        ({"memory": float("nan")}, "`memory` is missing, unknown or no positive number"),
    ],
)
def test_a_file_that_is_none_is_one_error(tmp_path: Path, changes: object, problem: str) -> None:
    path = tmp_path / "mine.json"
    to_file(KINDS["v100-32gb"], path)
    if isinstance(changes, str):
        path.write_text(changes)
    elif isinstance(changes, dict):
        new = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: value for name, value in new.items() if value is not None}))
    with pytest.raises(autotp.Error) as error:
        hardware_of(str(path))
    between = " " if problem.startswith("is") else ": "
    assert str(error.value) == f"gpu={str(path)!r}{between}{problem}\n  try      autotp calibrate --save mine.json"


def test_a_file_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(autotp.Error, match=r"No such file or directory\n  try      autotp calibrate --save"):
        hardware_of(str(tmp_path / "mine.json"))
    with pytest.raises(autotp.Error, match="cannot be written"):
        to_file(KINDS["v100-32gb"], tmp_path / "no" / "mine.json")


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("a1000", f"gpu='a1000' is not known\n  expected {', '.join(KINDS)}\n  try      a line, such as gpu={LINE!r}"),
        ("989TF 80GB", f"does not say memory_bandwidth, node_bandwidth, net_bandwidth, node\n  try      gpu={LINE!r}"),
        ("989TF fast", "gpu='989TF fast': `fast` cannot be read"),
        ("989TF 1TF", "`1TF` cannot be read"),
        ("0TF 1TB/s", "`0TF` cannot be read"),
        ("989TF node=0x1GB/s", "`node=0x1GB/s` cannot be read"),
        ("989TF like=a1000", "`like=a1000` cannot be read"),
        ("989TF like=cpu-gloo like=cpu-gloo", "`like=cpu-gloo` cannot be read"),
        ("989TF wire=1GB/s", "`wire=1GB/s` cannot be read"),
        (8, "gpu is of type int\n  expected a name, or a line"),
    ],
)
def test_what_cannot_be_read_is_one_error(gpu: str, message: str) -> None:
    with pytest.raises(autotp.Error) as error:
        hardware_of(gpu)
    assert message in str(error.value)


def test_a_kind_has_at_most_15_numbers() -> None:
    numbers = [v for v in vars(KINDS["a100-80gb"]).values() if not isinstance(v, str | bool)]
    assert len(numbers) <= 15 and all(isinstance(kind, Hardware) for kind in KINDS.values())
