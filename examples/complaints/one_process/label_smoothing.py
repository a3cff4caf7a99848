"""Label smoothing over a vocabulary that is cut

NVIDIA/Megatron-LM#737 (open since 2024): the loss over a cut vocabulary smooths over the rank's own part, so ranks have
different losses, and wrong gradients. NVIDIA/Megatron-LM#7452 (open) lists it among silent errors.

cross_entropy is taken apart like every operator: its mean over the classes is one more sum over the ranks.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autotp


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)), labels, label_smoothing=0.1)


tokens = torch.arange(12)
report = autotp.verify(Model(), tp=4, example_inputs={"tokens": tokens, "labels": tokens + 30})
assert [str(cut.layout) for cut in report.plan.cuts if cut.name == "head.weight"] == ["[50@tp, 16]"]
assert report.ok, report
