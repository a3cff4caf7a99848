"""A weight stays whole on every rank, and nobody says so

huggingface/transformers#42129 (merged): the plan's names did not match `w1`, `w2` and `w3` of Mixtral's experts, so
these were never cut, without a word. pytorch/torchtitan#875 (closed): an operator that DTensor does not know is an
error, and needs a sharding strategy, forward and backward.

Names are not read. An operator without a rule gets whole tensors, and the plan lists it with its line; `strict=True`
makes it an error if a weight of a block stays whole. A rule is one line of text, which autotp tries first.
"""

import torch
from torch import Tensor, nn

import autotp


@torch.library.custom_op("complaints::squared_relu", mutates_args=())
def squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


squared_relu.register_fake(torch.empty_like)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(squared_relu(self.w1(x)))


before = autotp.explain(MLP(), tp=2, example_inputs=torch.ones(3, 8))
assert [(row.name, row.reason) for row in before.whole] == [("complaints.squared_relu.default", "no rule: replicated")]

autotp.rule(torch.ops.complaints.squared_relu, "* -> *")
after = autotp.explain(MLP(), tp=2, example_inputs=torch.ones(3, 8))
assert before.traffic.forward == {"all-gather": 2} and after.traffic.forward == {"all-reduce": 1}
