"""plain_json: what schedules, scalers and optimizers keep comes back as it was; nothing else is written or made."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

import autotp
from autotp.checkpoint.files.plain_json import decode, encode


def there_and_back(value: Any) -> Any:
    kept: dict[str, Tensor] = {}

    def keep(tensor: Tensor) -> str:
        kept[str(len(kept))] = tensor
        return str(len(kept) - 1)

    return decode(json.loads(json.dumps(encode(value, "it", keep))), kept.__getitem__)


def same(a: Any, b: Any) -> bool:
    """Whether two values are of the same types, in the same order, with the same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype and (a.requires_grad == b.requires_grad)
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, numpy.ndarray):
        return bool((a == b).all()) and a.dtype == b.dtype
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(allow_nan=False)
)
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))


@given(
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner), st.frozensets(st.integers())
        ),
    )
)
def test_plain_values_come_back_from_json_as_they_were(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_counters_deques_sets_and_parameters_come_back_from_json() -> None:
    value = {
        "counter": Counter({3: 1, 7: 2}),
        "ordered": OrderedDict(a=1),
        "deque": deque([1.5]),
        "ring": deque([1, 2], maxlen=3),
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "deep": eval("[" * 90 + "]" * 90),
        "long": 10**3999,
        "set": {3, 1},
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "tensor": torch.tensor([1 + 2j, 3], dtype=torch.complex128),
        "number": numpy.float32(2.5),
        "array": numpy.arange(6).reshape(2, 3),
        "": "a key as ours",
        "infinite": -math.inf,
    }
    assert same(there_and_back(value), value)


def every_schedule() -> list[Any]:
    """One of each schedule that torch has."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    given: dict[str, dict[str, Any]] = {
        "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
        "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
        "StepLR": {"step_size": 2},
        "MultiStepLR": {"milestones": [2, 4]},
        "ConstantLR": {},
        "LinearLR": {},
        "ExponentialLR": {"gamma": 0.9},
        "SequentialLR": {"schedulers": None, "milestones": [2]},
        "PolynomialLR": {},
        "CosineAnnealingLR": {"T_max": 5},
        "ChainedScheduler": {"schedulers": None},
        "ReduceLROnPlateau": {},
        "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
        "CosineAnnealingWarmRestarts": {"T_0": 3},
        "OneCycleLR": {"max_lr": 0.2, "total_steps": 9},
    }
    missing = set(schedules.__all__) - set(given) - {"LRScheduler"}
    assert not missing, missing
    found = []
    for name, more in given.items():
        if "schedulers" in more:
            more["schedulers"] = [schedules.ConstantLR(optimizer), schedules.StepLR(optimizer, 2)]
        first = [] if name == "ChainedScheduler" else [optimizer]
        found.append(getattr(schedules, name)(*first, **more))
    return found


@pytest.mark.filterwarnings("ignore")
def test_states_of_all_torch_schedules_come_back_from_json() -> None:
    for schedule in [*every_schedule(), torch.amp.GradScaler("cpu"), torch.optim.AdamW([torch.ones(2)])]:
        state = schedule.state_dict()
        assert same(there_and_back(state), state), schedule
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.load_state_dict(there_and_back(state))


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    "value",
    [
        lambda: 0,
        object(),
        Path("x"),
        int,
        numpy.array([object()]),
        torch.ones(2).to_sparse(),
        type("N", (int,), {})(3),
        numpy.ma.array([1, 2], mask=[0, 1]),
        numpy.ones(2).view(type("A", (numpy.ndarray,), {})),
        numpy.array([1.0], dtype=">f4"),
        numpy.array([1.0], dtype=numpy.longdouble),
        numpy.longdouble(1),
        torch.empty(3, device="meta"),
        nested(),
        type("D", (deque,), {})([1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_that_are_not_plain_are_refused_by_path(value: Any) -> None:
    with pytest.raises(autotp.Error) as raised:
        there_and_back({"a": [0, value]})
    kind = type(value)
    assert str(raised.value).splitlines()[0] == (
        f"it['a'][1] is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold"
    )


def cyclic() -> list[Any]:
    value: list[Any] = [1]
    value.append({"a": (value,)})
    return value


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (cyclic(), "is nested more than 100 deep, or holds itself"),
        (eval("[" * 90 + "(" * 90 + ")" + ",)" * 89 + "]" * 90), "is nested more than 100 deep, or holds itself"),
        (10**5000, "is a number of more than 4,000 digits"),
        (-(10**5000), "is a number of more than 4,000 digits"),
    ],
    ids=["cyclic", "deep", "long", "long, negative"],
)
def test_cyclic_or_too_large_values_are_refused(value: Any, told: str) -> None:
    with pytest.raises(autotp.Error) as raised:
        there_and_back({"a": value})
    assert str(raised.value).splitlines()[0].endswith(told)
    assert len(str(raised.value).splitlines()[0]) < 200
