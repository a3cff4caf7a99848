"""links: the seconds of a collective, by its algorithm and by the links that its group crosses.

Ranks are placed as the mesh of `distribute` places them: tensor-parallel ranks are neighbours, then replicas, then
stages. A ring sends each byte once over each link; between nodes its bandwidth is that of the adapters of all ranks of
the group in a node. A tree has fewer steps, and sends whole tensors.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH"; NCCL tests, PERFORMANCE.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotp.costs.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """A group of ranks that communicate.

    Attributes:
        size: the number of ranks.
        stride: the distance of neighbours among all ranks.
    """

    size: int
    stride: int

    def per_node(self, device: Hardware) -> int:
        """Returns the number of its ranks in one node."""
        return max(1, min(self.size, device.node // self.stride))

    def crosses(self, device: Hardware) -> bool:
        """Returns whether the group is in more than one node."""
        return self.per_node(device) < self.size


CHANNELS = 24
"""The units that NCCL takes for a collective: its channels in a DGX A100, as it logs them."""
CHANNEL_BANDWIDTH = 300e9 / CHANNELS
"""Bytes/s of a channel: in a DGX A100 that many channels fill links of 300 GB/s."""


def channels(group: RankGroup, device: Hardware) -> int:
    """Returns the units that a collective of this group takes: as many channels as its slowest link needs.

    A group with one rank in each node has one adapter for each, and few channels.
    """
    ranks_per_node = group.per_node(device)
    bandwidth = min(device.node_bandwidth, device.net_bandwidth * ranks_per_node) if group.crosses(device) else math.inf
    return max(1, min(CHANNELS, math.ceil(min(bandwidth, device.node_bandwidth) / CHANNEL_BANDWIDTH)))


RINGS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
"""How often a ring goes around for a collective."""


def collective_seconds(name: str, size: float, group: RankGroup, device: Hardware) -> float:
    """Returns the seconds of a collective.

    Args:
        name: all-reduce, all-gather, reduce-scatter or all-to-all.
        size: the bytes of the tensor that is summed, or that its ranks hold together; of an all-to-all, a rank's bytes.
    """
    if group.size == 1 or not size:
        return 0.0
    if name == "reduce-scatter" and not device.is_gpu:
        name = "all-reduce"  # gloo sums the whole tensor on all ranks.
    if name == "all-to-all":
        return _exchange_seconds(size, group, device)
    per_node, rounds = group.per_node(device), RINGS[name]
    bandwidth = device.node_bandwidth * device.link_sustained
    if group.crosses(device):
        across = device.net_bandwidth * device.net_sustained * per_node
        bandwidth = min(bandwidth, across) if per_node > 1 else across
    steps = group.size - 1
    ring = rounds * (steps / group.size * size / bandwidth + steps * device.latency)
    if name != "all-reduce":
        return ring  # NCCL has trees for sums only.
    tree = rounds * (math.ceil(math.log2(group.size)) * device.latency + size / bandwidth)
    return min(ring, tree)


def _exchange_seconds(size: float, group: RankGroup, device: Hardware) -> float:
    """Returns the seconds of an all-to-all: a rank sends as much to each other one, in its node and beside to others.

    To ranks of other nodes it sends through its own adapter alone.

    Args:
        size: the bytes of a rank, of which it keeps one part in `group.size`.
    """
    per_node, part = group.per_node(device), size / group.size
    inside = (per_node - 1) * part / (device.node_bandwidth * device.link_sustained)
    outside = (group.size - per_node) * part / (device.net_bandwidth * device.net_sustained)
    return max(inside, outside) + (group.size - 1) * device.latency


def send_seconds(size: float, distance: int, device: Hardware) -> float:
    """Returns the seconds to send a tensor to a rank at this distance."""
    bandwidth = device.net_bandwidth if distance >= device.node else device.node_bandwidth
    return size / (bandwidth * device.link_sustained) + device.latency
