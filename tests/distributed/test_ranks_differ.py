"""Ranks that save, load or generate with arguments of their own: one error on all, and nothing is mixed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from errors import message
from hugging_face import built, prompt
from ranks import run_ranks
from torch import Tensor, nn
from trainers import fingerprint, started, trained

import autotp
from autotp.integrations.transformers import pretrained


def problem(call: Any) -> str:
    return message(call).splitlines()[0]


def training(rank: int, n: int, folder: str) -> list[str]:
    """Another folder, and another step, than the first rank's; then a state dict of other names."""
    trainer, optimizer = started((2, 1, 1))
    trained(trainer, optimizer, range(1))
    own, both = Path(folder, f"of-{rank}"), Path(folder, "both")
    found = [problem(lambda: autotp.save_checkpoint(own, trainer, optimizer, 1))]
    found.append(problem(lambda: autotp.save_checkpoint(both, trainer, optimizer, 1 + rank)))
    dist.barrier()
    assert {file.name for at in (own, both) for file in at.iterdir()} <= {".lock"}
    found.append(problem(lambda: autotp.full_state_dict(trainer, lambda name: name.startswith(("wte", "h.")[rank]))))
    before = fingerprint(trainer, optimizer)
    autotp.save_checkpoint(both, trainer, optimizer, 1)
    assert autotp.load_checkpoint(both, trainer, optimizer) == 1 and fingerprint(trainer, optimizer) == before
    trained(trainer, optimizer, range(1))
    before = fingerprint(trainer, optimizer)
    found.append(problem(lambda: autotp.load_checkpoint(both, trainer, optimizer if rank else None)))
    more = {"optimizer_again": optimizer} if rank else {}
    found.append(problem(lambda: autotp.load_checkpoint(both, trainer, optimizer, **more)))
    assert fingerprint(trainer, optimizer) == before
    return found


def test_checkpoints_of_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(training, 2, str(tmp_path), timeout=100)):
        assert found == [
            f"save_checkpoint: rank 0 does not see what rank 1 wrote: rank-00001.tensors is not in {tmp_path}/of-0",
            "save_checkpoint: global rank 1 saves another step than rank 0",
            "full_state_dict: global rank 1 wants other names than rank 0",
            *["load_checkpoint: global rank 1 loads something else than rank 0"] * 2,
        ], rank


class Own(transformers.LogitsProcessor):
    """Forces another token on each rank."""

    def __init__(self, rank: int) -> None:
        self.token = 5 + rank

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.token]), 0.0)


def loading(rank: int, n: int) -> list[str]:
    """Wrong shapes on the second rank; then only the first loads, and the model's calls are no longer compared."""
    torch.manual_seed(0)
    # Its sums have as many bytes as those of an agreement: gloo ends a process that gets another number of bytes.
    batch = torch.ones(3, 8)
    model: Any = nn.Sequential(nn.Linear(8, 15), nn.GELU(), nn.Linear(15, 8))
    model = autotp.parallelize(model, n, example_inputs=batch, timeout=timedelta(seconds=3))
    for _ in range(3):
        expected = model(batch)
    own = model.state_dict()
    wrong = {name: torch.ones(3) if rank else tensor + 1 for name, tensor in own.items()}
    found = [problem(lambda: model.load_state_dict(wrong))]
    assert torch.equal(model(batch), expected)
    # The first sum of the second rank is paired with that agreement, the second one with nothing.
    found.append(problem(lambda: model.load_state_dict(own) if rank == 0 else [model(batch) for _ in range(2)]))
    return found


def test_load_state_dict_of_ranks_that_differ_is_refused() -> None:
    """One error on every rank, and nothing is changed."""
    one, other = run_ranks(loading, 2, timeout=60)
    told = (
        "Sequential.load_state_dict: `0.weight` is [3]: neither the whole, [15, 8], nor the part that this rank holds, "
    )
    assert one[0] == other[0] == told + "[7, 8]"
    assert one[1].startswith("Sequential.load_state_dict: all_gather_into_tensor over axis `tp` failed on rank 0")
    assert one[1].endswith("(global rank 0): this rank called load_state_dict, and not all ranks did")
    assert other[1].endswith("(global rank 1): tp rank 0 (global rank 0) called load_state_dict, and not all ranks did")


def of_transformers(rank: int, n: int, folder: str) -> list[str]:
    """Other files than the first rank's, files that change while they are read, other settings; then all as before."""
    one, two, out = (Path(folder, name) for name in ("one", "two", "out"))
    if rank == 0:
        model = built("gpt2")
        model.save_pretrained(one)
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight += 0.01
        model.save_pretrained(two)
    dist.barrier()
    found = files_that_differ(rank, n, one, two)
    model = autotp.from_pretrained(one, tp=n)
    found.append(problem(lambda: autotp.save_pretrained(model, out, max_shard_size="10KB" if rank else "20KB")))
    found += calls_that_differ(model, rank)
    found += saves_that_differ(model, rank, out)
    processors_of_the_first_rank(model, rank)
    assert not out.exists() and model.generate(**prompt(), max_new_tokens=3).shape == (2, 10)
    return [text.partition(": ")[2] for text in found]


def files_that_differ(rank: int, n: int, one: Path, two: Path) -> list[str]:
    """From the start, or since they were compared."""
    found = [problem(lambda: autotp.from_pretrained(two if rank else one, tp=n))]
    read = pretrained.read_parts

    def late(*given: Any) -> Any:
        dist.barrier()
        if rank == 0:
            (one / "model.safetensors").unlink()
            (two / "model.safetensors").rename(one / "model.safetensors")
        dist.barrier()
        return read(*given)

    pretrained.read_parts = late
    found.append(problem(lambda: autotp.from_pretrained(one, tp=n)))
    pretrained.read_parts = read
    return found


def calls_that_differ(model: Any, rank: int) -> list[str]:
    """Settings, processors and criteria of `generate`, and its inputs."""
    masked = [transformers.SuppressTokensLogitsProcessor([i + 40 * rank for i in range(40)])]
    stopped = [transformers.MaxLengthCriteria(9 + rank)]
    found = [
        problem(lambda how=how: model.generate(**prompt(), **how))
        for how in (
            {"max_new_tokens": 3 + rank},
            {"max_new_tokens": 3, "do_sample": bool(rank)},
            {"max_new_tokens": 3, "logits_processor": transformers.LogitsProcessorList(masked)},
            {"max_new_tokens": 3, "logits_processor": transformers.LogitsProcessorList(masked[:rank])},
            {"max_new_tokens": 3, "stopping_criteria": transformers.StoppingCriteriaList(stopped)},
        )
    ]
    for _ in range(3):  # Until forward compares inputs no more.
        model.generate(**prompt(), max_new_tokens=3)
    masks = torch.ones(2, 7).long().index_fill_(1, torch.arange(rank), 0)
    for given in ({"input_ids": prompt()["input_ids"].roll(rank)}, {"attention_mask": masks}):
        found.append(problem(lambda given=given: model.generate(**{**prompt(), **given}, max_new_tokens=3)))
    return found


def saves_that_differ(model: Any, rank: int, out: Path) -> list[str]:
    """A size that one rank cannot read, and configurations that cannot be written."""
    found = [problem(lambda: autotp.save_pretrained(model, out, max_shard_size="much" if rank else "20KB"))]
    for config, name, value in ((model.generation_config, "temperature", 0.5), (model.config, "own", problem)):
        setattr(config, name, value)
        found.append(problem(lambda: autotp.save_pretrained(model, out)).partition(" cannot be written: ")[0])
        delattr(config, name)
    return found


def processors_of_the_first_rank(model: Any, rank: int) -> None:
    """What cannot be compared is asked on the first rank alone: all ranks get its tokens, or its error."""
    own = transformers.LogitsProcessorList([Own(rank)])
    for beams in (1, 2):
        of_first = model.generate(**prompt(), max_new_tokens=3, num_beams=beams, logits_processor=own)
        assert of_first[:, 7:].eq(5).all()
    for beams in (1, 2):
        how = {"max_new_tokens": 3, "num_beams": beams}
        asked = model.generate(**prompt(), **how, prefix_allowed_tokens_fn=lambda batch, tokens: [5 + rank, 9 + rank])
        assert torch.isin(asked[:, 7:], torch.tensor([5, 9])).all()
    allowed: Any = {"prefix_allowed_tokens_fn": lambda batch, tokens: [5] if rank == 0 or len(tokens) < 9 else []}
    with pytest.raises(ValueError if rank else autotp.Error, match="returned an empty list"):
        model.generate(**prompt(), max_new_tokens=3, **allowed)


@pytest.mark.system
def test_files_of_transformers_of_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    for found in run_ranks(of_transformers, 2, str(tmp_path), timeout=100):
        assert found == [
            "tp rank 1 sees another checkpoint than rank 0",
            "the checkpoint was replaced while it was read",
            "tp rank 1 would write other files than rank 0",
            *["tp rank 1 generates with other settings than rank 0"] * 5,
            *["tp rank 1 generates from other inputs than rank 0"] * 2,
            "max_shard_size='much' is no size",
            "model.generation_config",
            "model.config",
        ]
