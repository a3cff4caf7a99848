"""state_dict: whole state dicts from and to shards, bit for bit, and the norm of the whole gradient."""

import copy

import pytest
import torch
from errors import message
from ranks import Checks
from small_models import VOCAB, gpt, tokens
from torch import Tensor, nn

import autotp
from autotp.models.bert import BERT, BERTConfig

checks = Checks()
SEVEN = {"n_layer": 1, "n_head": 7, "n_embd": 56}
"""The sizes of a GPT whose heads are uneven on three and on four ranks."""
THREE = {"n_layer": 1, "n_head": 3, "n_embd": 24}


def bert() -> BERT:
    """Separate q, k and v, and a decoder tied to the embedding with a bias of its own."""
    return BERT(BERTConfig(block_size=16, vocab_size=VOCAB, n_layer=1, n_head=3, n_embd=48, dropout=0.0)).double()


# ---- state dicts


class Tied(nn.Module):
    """A tied weight under two names, a buffer saved and one not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5]))
        self.register_buffer("scratch", torch.tensor([0.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.scale * self.down(nn.functional.gelu(self.up(x))))


@checks.on(3)
@checks.on(2, 4, rare=True)
def full_state_dict_and_load_full_state_dict_are_inverses(rank: int, n: int) -> None:
    """Gathering and cutting are inverses, bit for bit; what one device holds comes out, and goes in."""
    for make, example in ((gpt, None), (bert, None), (Tied, torch.arange(6).view(2, 3))):
        whole, other = make(), make()
        parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=example)
        for source in (whole, other):
            if source is other:
                autotp.load_full_state_dict(parallel, source.state_dict() if rank == 0 else {})
            found = autotp.full_state_dict(parallel)
            assert list(found) == (list(source.state_dict()) if rank == 0 else [])
            for name, tensor in found.items():
                assert torch.equal(tensor, source.state_dict()[name]) and tensor.device.type == "cpu", name
        for name, parameter in other.named_parameters():
            mine = parallel.get_parameter(name)
            assert torch.equal(mine, parameter), name
    assert parallel.head.weight is parallel.embed.weight
    if rank == 0:
        assert found["head.weight"] is found["embed.weight"]


META, ODD = "on meta: it has no values", "not dense, or quantized"


@checks.on(3)
def load_full_state_dict_refuses_wrong_states_on_every_rank(rank: int, n: int) -> None:
    """What is wrong on the first rank is an error on every rank, and nothing is changed."""
    parallel = autotp.parallelize(gpt(**SEVEN).double(), n)
    right = autotp.full_state_dict(parallel)
    before = {name: tensor.clone() for name, tensor in parallel.state_dict().items()}
    fewer = {name: tensor + 1 for name, tensor in right.items() if name != "wpe.weight"}
    wrong = [
        (fewer, "the state dict is another model's; missing: wpe.weight"),
        (right | {"a": torch.ones(1), "b": torch.ones(1)}, "the state dict is another model's; unexpected: a, b"),
        (fewer | {"a": torch.ones(1)}, "the state dict is another model's; missing: wpe.weight; unexpected: a"),
        (
            right | {"wte.weight": torch.ones(5, 56)},
            "`wte.weight` is [5, 56] in the state dict and [97, 56] in the model",
        ),
        (right | {"wte.weight": None}, "`wte.weight` is a NoneType in the state dict, and no tensor"),
    ]
    weight = gpt(**SEVEN).wte.weight.detach()
    with pytest.warns(UserWarning, match="deprecated"):
        quantized = torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)
    for given, what in ((weight.to("meta"), META), (weight.to_sparse(), ODD), (quantized, ODD)):
        wrong.append((right | {"wte.weight": given}, f"`wte.weight` in the state dict is {what}"))
    for state, problem in wrong:
        assert message(lambda state=state: autotp.load_full_state_dict(parallel, state if rank == 0 else {})) == (
            f"load_full_state_dict: {problem}\n  try      the state dict of the model that was parallelized"
            + "\n  on       tp rank 0" * (rank > 0)
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in parallel.state_dict().items())


@checks.on(2)
def full_state_dict_tells_all_ranks_that_wanted_failed(rank: int, n: int) -> None:
    """A `wanted` that raises on one rank alone is an error on all, and the next call is as good as before."""
    parallel = autotp.parallelize(gpt(**SEVEN).double(), n)

    def wanted(name: str) -> bool:
        if rank == 1 and name == "ln_f.weight":
            raise ValueError("no")
        return True

    with pytest.raises(
        ValueError if rank else autotp.Error, match="^no$" if rank else "full_state_dict: ValueError: no"
    ):
        autotp.full_state_dict(parallel, wanted)
    assert len(autotp.full_state_dict(parallel)) == len(parallel.state_dict()) * (rank == 0)


# ---- the norm


@checks.on(2)
@checks.on(4, rare=True)
def clip_grad_norm_equals_one_device(rank: int, n: int) -> None:
    """Equal to one device's: replicated gradients counted once, tied ones too, frozen ones and None left out."""
    whole = gpt(**THREE).double()
    whole.wpe.requires_grad_(False)
    parallel = autotp.parallelize(copy.deepcopy(whole), n, check_inputs="never")
    for order in (2.0, 1.0, 3.0, float("inf")):
        for limit in (1e-3, 1e3):
            for model in (whole, parallel):
                model.zero_grad()
                model(*tokens(seq=4)).backward()
                model.ln_f.bias.grad = None
            expected = nn.utils.clip_grad_norm_(whole.parameters(), limit, order)
            found = autotp.clip_grad_norm_(parallel, limit, order)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            for a, b in zip(whole.parameters(), parallel.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None:
                    torch.testing.assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-12)


@checks.on(2)
def clip_grad_norm_of_empty_half_and_infinite_gradients(rank: int, n: int) -> None:
    """No gradients, half precision, what is infinite, and what is no norm."""
    parallel = autotp.parallelize(gpt(**THREE).double(), n)
    assert autotp.clip_grad_norm_(parallel, 1.0) == 0
    parallel.to(torch.float16)
    for p in parallel.parameters():
        p.grad = torch.full_like(p, 100.0)
    count = sum(p.numel() for p in gpt(**THREE).double().parameters())
    assert abs(autotp.clip_grad_norm_(parallel, 1.0).item() / (100 * count**0.5) - 1) < 1e-3
    parallel.to(torch.float32)
    parallel.ln_f.weight.grad[0] = torch.inf
    assert autotp.clip_grad_norm_(parallel, 1.0) == torch.inf
    parallel.ln_f.weight.grad[0] = torch.inf
    assert message(lambda: autotp.clip_grad_norm_(parallel, 1.0, error_if_nonfinite=True)) == (
        "clip_grad_norm_: the norm of the gradient is inf\n  try      error_if_nonfinite=False"
    )
    assert message(lambda: autotp.clip_grad_norm_(parallel, 1.0, 0)) == (
        "clip_grad_norm_: norm_type=0\n  expected a number above 0, or inf"
    )


@checks.on(2)
def parallel_model_prints_cuts_and_loads_either_state(rank: int, n: int) -> None:
    """The model's own names with what is cut; its own state, and the original model's in its place."""
    whole = gpt(**SEVEN).double()
    full = copy.deepcopy(whole.state_dict())
    cut = autotp.parallelize(whole, n, example_inputs=tokens(seq=4))
    shown = str(cut).splitlines()
    assert shown[:3] == ["GPT(", f"  tp=2, rank {rank} on cpu", "  (wte): Embedding(97, 56, weight [97@tp, 56])"]
    assert "(c_attn): Linear(in_features=56, out_features=168, bias=True, weight [168@tp, 56], bias [168@tp])" in str(
        cut
    )
    before = {name: value.clone() for name, value in cut.state_dict().items()}
    assert not cut.load_state_dict({name: value + 1 for name, value in full.items()}).missing_keys
    assert torch.equal(cut.wte.weight, before["wte.weight"] + 1)
    assert not cut.load_state_dict(before).missing_keys


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


# ---- one process


@pytest.mark.parametrize("call", ["full_state_dict", "load_full_state_dict", "clip_grad_norm_"])
def test_state_dict_calls_refuse_an_ordinary_model(call: str) -> None:
    rest = {"full_state_dict": (), "load_full_state_dict": ({},), "clip_grad_norm_": (1.0,)}[call]
    for model in (nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2)), None):
        assert message(lambda model=model: getattr(autotp, call)(model, *rest)) == (
            f"{call}: a {type(model).__name__} is not a parallel model\n"
            f"  try      {call}(model, ...), with the model that autotp.parallelize returned"
        )
