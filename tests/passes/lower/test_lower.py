"""lower: what the graph of a rank has no more of than it needs."""

import torch
from small_models import Plain
from torch import Tensor, nn

import autotp


class Branches(Plain):
    """Attention and MLP read one norm; torch's MultiheadAttention turns what it reads, and the MLP does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0] + self.mlp(y)


def test_a_view_of_the_copy_is_no_second_copy() -> None:
    report = autotp.verify(Branches(), 2, example_inputs=torch.linspace(-1, 1, 120).view(3, 5, 8))
    assert report.ok, report
    assert (report.plan.traffic.forward, report.plan.traffic.backward) == ({"all-reduce": 1}, {"all-reduce": 1})
