"""Kinds of devices, and lines that describe one's own."""

import pytest

import autotp
from autotp.estimation.seconds.hardware import GIB, KINDS, LINE, Hardware, hardware_of


def test_a_kind_is_found_by_name() -> None:
    assert hardware_of("A100_80GB") is KINDS["a100-80gb"] and hardware_of("h100-80gb").memory == 80 * GIB


def test_a_line_describes_a_device() -> None:
    found = hardware_of("312TF 2TB/s 80GiB node=4x300GB/s net=25GB/s")
    assert (found.matrix_flops, found.memory_bandwidth, found.memory) == (312e12, 2e12, 80 * GIB)
    assert (found.node, found.node_bandwidth, found.net_bandwidth) == (4, 300e9, 25e9)
    assert not found.measured


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("a1000", f"gpu='a1000' is not known\n  expected {', '.join(KINDS)}\n  try      a line, such as gpu={LINE!r}"),
        ("989TF 80GB", f"does not say memory_bandwidth, node_bandwidth, net_bandwidth, node\n  try      gpu={LINE!r}"),
        ("989TF fast", "gpu='989TF fast': `fast` cannot be read"),
        ("989TF 1TF", "`1TF` cannot be read"),
        ("0TF 1TB/s", "`0TF` cannot be read"),
        ("989TF node=0x1GB/s", "`node=0x1GB/s` cannot be read"),
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
