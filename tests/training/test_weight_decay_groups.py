"""weight_decay_groups: matrices decay, vectors do not."""

from __future__ import annotations

from small_models import gpt
from trainers import SMALL

import autotp


def test_weight_decay_groups_decay_matrices_only() -> None:
    decayed, others = autotp.weight_decay_groups(gpt(seed=0, **SMALL), 0.1)
    names = {id(p): name for name, p in gpt(seed=0, **SMALL).named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 for p in decayed["params"]) and all(p.dim() == 1 for p in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)
