"""Explains and verifies a model of your own at tp=2, 3 and 4, in one process and without a GPU.

    python examples/verify_my_model.py

The model is not written for autotp. It uses an operator that autotp does not know; one line gives the operator's rule.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autotp


@torch.library.custom_op("mylib::squared_relu", mutates_args=())
def squared_relu(x: Tensor) -> Tensor:
    """Returns the square of relu(x) (So et al. 2021, Primer). x, result: [...]"""
    return x.relu().square()


@squared_relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


squared_relu.register_autograd(
    lambda ctx, grad: grad * 2 * ctx.saved_tensors[0].relu(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

# Without this line the MLP would stay whole on every rank, and the plan would say so.
autotp.rule(torch.ops.mylib.squared_relu, "* -> *")


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch seq width], as is the result
        h = self.norm1(x)
        q, k, v = (self.split(project(h)) for project in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(squared_relu(self.up(self.norm2(x))))

    def split(self, x: Tensor) -> Tensor:  # [batch seq (heads d)] -> [batch heads seq d]
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class MyModel(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, vocab: int = 100, width: int = 48, heads: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(Block(width, heads), Block(width, heads))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch seq] -> [batch seq vocab]
        return self.head(self.blocks(self.embed(tokens)))


def main() -> None:
    """Prints the plan, and the result of `verify` for three numbers of ranks."""
    torch.manual_seed(0)
    model = MyModel()
    print(autotp.explain(model, tp=4))  # 6 heads on 4 ranks are 2, 2, 2 and 0: nothing has to divide.
    for tp in (2, 3, 4):
        report = autotp.verify(model, tp=tp)
        print(f"\n{report}")
        assert report.ok


if __name__ == "__main__":
    main()
