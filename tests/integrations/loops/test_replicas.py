"""Replicas beside tensor-parallel ranks: accelerate and Trainer take the replicas for their processes.

The same script runs on four ranks (two replicas of two ranks), on two processes under accelerate's own
DistributedDataParallel, and on one device with the whole batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from hugging_face import Rows, expect_close, llama_in_float64, on_cpu
from ranks import run_ranks

import autotp

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
STEPS, SAVED = 5, 2


class Equal(Rows):
    """Texts of equal length: a mean of means is the mean."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(i)
        return row | {"labels": row["input_ids"], "attention_mask": torch.ones(12, dtype=torch.long)}


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows in another order on each process, as a stream over a network may come."""

    def __init__(self, count: int, shift: int) -> None:
        self.count, self.shift = count, shift

    def __iter__(self) -> Any:
        return iter([Equal(0)[(i + self.shift) % self.count] for i in range(self.count)])


def loader(kind: str, rank: int, size: int) -> Any:
    """Of rows in the order of the first process."""
    if kind in ("stream", "dispatched"):
        return torch.utils.data.DataLoader(Stream(22, rank * (kind == "dispatched")), batch_size=size)
    order = torch.Generator().manual_seed(5 + rank)
    rows = Equal(24 if kind == "even" else 22)
    return torch.utils.data.DataLoader(rows, size, shuffle=True, generator=order, drop_last=kind == "drop")


def loop(rank: int, n: int, tp: int, folder: Path, kind: str) -> dict[str, Any]:
    """Accumulates, clips and schedules; saves in the middle, and runs the rest again from there."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(3)
    replicas = n // tp
    model: Any = llama_in_float64()
    if tp > 1:
        torch.manual_seed(3 + rank)  # All ranks start from the first rank's values and rows.
        torch.nn.init.normal_(model.lm_head.weight) if rank else None
        model = autotp.parallelize(model, tp)
    plain = accelerate.DataLoaderConfiguration(dispatch_batches=kind == "dispatched")
    made = accelerate.Accelerator(cpu=on_cpu(tp > 1), gradient_accumulation_steps=2, dataloader_config=plain)
    assert (made.num_processes, made.process_index) == (replicas, rank // tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6 * replicas)  # accelerate steps it as often.
    given = (model, optimizer, loader(kind, rank, 4 // replicas), schedule)
    model, optimizer, rows, schedule = made.prepare(*given)
    found: dict[str, Any] = {"log": [], "ids": []}
    batches = list(rows)
    for turn in range(2):
        for i, batch in enumerate(batches):
            if turn and i < SAVED:
                continue
            if i == SAVED:
                (made.load_state if turn else made.save_state)(str(folder))
            with made.accumulate(model):
                loss = model(**batch).loss
                made.backward(loss)
                norm = made.clip_grad_norm_(model.parameters(), 0.5) if made.sync_gradients else torch.zeros(())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            mean = made.gather(loss.detach()).mean()
            found["log"].append((mean.item(), float(norm), optimizer.param_groups[0]["lr"]))
            found["ids"].append(made.gather(batch["input_ids"]))
        made.wait_for_everyone()
    found["seen"] = sum(len(made.gather_for_metrics(batch["input_ids"])) for batch in rows)
    found["state"] = made.get_state_dict(model)
    made.unwrap_model(model).save_pretrained(
        folder / "model", is_main_process=made.is_main_process, save_function=made.save,
        state_dict=made.get_state_dict(model),
    )  # fmt: skip
    made.wait_for_everyone()
    return found


RARE = [pytest.param(kind, marks=pytest.mark.rare) for kind in ("drop", "stream", "dispatched")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["even", pytest.param("uneven", marks=pytest.mark.rare), *RARE])
def test_accelerate_takes_replicas_for_processes(tmp_path: Path, kind: str) -> None:
    n = 1 if kind == "even" else 2  # Elsewhere accelerate's last batch has rows twice, or is left out.
    expected = run_ranks(loop, n, 1, tmp_path / "plain", kind, timeout=120)[0]
    found = run_ranks(loop, 4, 2, tmp_path / "four", kind, timeout=300)
    for it in found:
        expect_close(it["log"], expected["log"])
        pairs = zip(it["ids"], expected["ids"], strict=True)
        assert all(torch.equal(a.cpu().sort(0)[0], b.sort(0)[0]) for a, b in pairs)
        assert it["seen"] == expected["seen"]
    state = {name.removeprefix("module."): x for name, x in expected["state"].items()}
    expect_close(found[0]["state"], state)
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "four" / "model")
    expect_close(saved.state_dict(), state)


def calls(rank: int, n: int) -> dict[str, Any]:
    """What accelerate says of processes, sends between them, and leaves to one of them."""
    model: Any = autotp.parallelize(torch.nn.Linear(4, 6), 2, example_inputs=torch.ones(2, 4))
    made = accelerate.Accelerator()
    state, operations = accelerate.PartialState(), accelerate.utils
    found: dict[str, Any] = {"index": (made.num_processes, made.process_index, made.local_process_index)}
    found["first"] = made.is_main_process, made.is_local_main_process, made.is_last_process, state.is_last_process
    one = torch.tensor([10.0 * rank], device=made.device)
    found["gather"] = made.gather(one).tolist(), made.gather_for_metrics({"a": one})["a"].tolist()
    found["numbers"] = made.gather(torch.tensor(rank, device=made.device)).tolist(), made.reduce(one, "mean").item()
    found["sum"] = made.reduce(one).item()
    ones = torch.ones(1 + rank // 2, device=made.device)
    found["padded"] = made.gather(made.pad_across_processes(ones, dim=0)).tolist()
    found["objects"] = operations.gather_object([rank]), made.gather_for_metrics([f"row {rank}"])
    found["sent"] = operations.broadcast(one.clone(), 1).item(), operations.broadcast_object_list([rank], 1)
    with made.split_between_processes(list(range(5))) as mine:
        found["split"] = mine
    ran = {name: decorate(lambda: rank)() for name, decorate in (
        ("main", made.on_main_process), ("last", made.on_last_process), ("second", made.on_process(process_index=1)),
    )}  # fmt: skip
    found["ran"] = ran
    if rank == 3:
        made.set_trigger()
    found["triggers"] = made.check_trigger(), made.check_trigger()
    prepared = made.prepare(model)
    assert isinstance(prepared, torch.nn.parallel.DistributedDataParallel) and made.unwrap_model(prepared) is model
    found["group"] = dist.get_process_group_ranks(prepared.process_group)
    config = accelerate.ParallelismConfig
    accelerate.Accelerator(parallelism_config=config(tp_size=2))
    with pytest.raises(autotp.Error) as raised:
        accelerate.Accelerator(parallelism_config=config(dp_shard_size=4))
    found["refused"] = str(raised.value).splitlines()[0]
    return found


def test_accelerate_calls_go_over_the_replicas() -> None:
    for rank, found in enumerate(run_ranks(calls, 4, timeout=100, fresh=True)):
        mine = [rank % 2, rank % 2 + 2]
        assert found["index"] == (2, rank // 2, rank)
        assert found["first"] == (rank == 0, rank == 0, rank == 3, rank == 3)
        assert found["gather"] == ([10 * it for it in mine],) * 2
        assert found["numbers"] == (mine, 10 * sum(mine) / 2) and found["sum"] == 10 * sum(mine)
        assert found["padded"] == [1, 0, 1, 1]
        assert found["objects"] == (mine, [f"row {it}" for it in mine])
        assert found["sent"] == (20, [2]), "the first rank of the second replica sends to all"
        assert found["split"] == ([0, 1, 2], [3, 4])[rank // 2]
        assert found["ran"] == {name: rank if rank == at else None for name, at in zip(RAN, (0, 3, 2), strict=True)}
        assert found["triggers"] == (True, False), "of one rank"
        assert found["group"] == mine
        told = "the model is parallel over 2 ranks, in 2 replicas, and ParallelismConfig says {'dp_shard': 4}"
        assert found["refused"] == told


RAN = ("main", "last", "second")


KEPT = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_rows", "learning_rate", "step", "total_flos")


def metrics(prediction: Any) -> dict[str, float]:
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "rows": len(prediction.label_ids)}


def trained(rank: int, n: int, tp: int, folder: Path, by_replica: bool) -> dict[str, Any]:
    """Six steps; then the last two again from the checkpoint after four, with a new model and trainer."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    found: dict[str, Any] = {"logs": []}
    asked = Rows(5) if by_replica else Equal(8)  # accelerate fills a last batch with rows that it had.
    # transformers cannot go on with several processes on a CPU: torch.load does not know "cpu:0".
    for resumed in (None, str(folder / "checkpoint-4"))[: 1 if n > tp == 1 else 2]:
        model: Any = llama_in_float64()
        model = autotp.parallelize(model, tp) if tp > 1 else model
        arguments = transformers.TrainingArguments(
            str(folder), per_device_train_batch_size=4 * tp // n, per_device_eval_batch_size=4 * tp // n,
            gradient_accumulation_steps=2, max_steps=6, logging_steps=1, eval_strategy="steps", eval_steps=2,
            save_strategy="steps", save_steps=2, learning_rate=1e-2, adam_epsilon=1e-2, max_grad_norm=1.0,
            load_best_model_at_end=resumed is None, metric_for_best_model="loss", report_to=[], use_cpu=on_cpu(tp > 1),
            disable_tqdm=True, average_tokens_across_devices=not by_replica,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=Rows(24), eval_dataset=asked, compute_metrics=metrics
        )
        assert (arguments.world_size, arguments.process_index) == (n // tp, rank // tp)
        first = arguments.should_save, arguments.should_log, trainer.is_world_process_zero()
        assert first == (rank == 0,) * 3 and trainer.is_local_process_zero() == (rank == 0)
        trainer.train(resume_from_checkpoint=resumed)
        found["logs"].append([{key: row[key] for key in KEPT if key in row} for row in trainer.state.log_history])
        found["predicted"] = trainer.predict(asked).predictions
    found["state"] = autotp.full_state_dict(model) if tp > 1 else model.state_dict()
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("by_replica", [False, pytest.param(True, marks=pytest.mark.rare)])
def test_trainer_takes_replicas_for_processes(tmp_path: Path, by_replica: bool) -> None:
    """A mean over the tokens of all replicas is one device's; a mean of each replica's is that of two processes."""
    n = 2 if by_replica else 1
    expected = run_ranks(trained, n, 1, tmp_path / "plain", by_replica, timeout=120)[0]
    found = run_ranks(trained, 4, 2, tmp_path / "four", by_replica, timeout=300)
    for it in found:
        expect_close(it["logs"][: len(expected["logs"])], expected["logs"])
        expect_close(it["logs"][1][-5:-1], it["logs"][0][-5:-1])
        expect_close(torch.from_numpy(it["predicted"]), torch.from_numpy(expected["predicted"]))
    expect_close(found[0]["state"], expected["state"])
    names = [{path.name for path in (tmp_path / it / "checkpoint-6").iterdir()} for it in ("plain", "four")]
    assert {f"rng_state_{i}.pth" for i in range(2)} <= names[1]
    assert {name for name in names[0] if "rng" not in name} <= names[1]
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "four" / "checkpoint-6")
    expect_close(saved.state_dict(), expected["state"])
    optimizers = [torch.load(tmp_path / it / "checkpoint-6" / "optimizer.pt") for it in ("plain", "four")]
    expect_close(optimizers[1], optimizers[0])


def beside(rank: int, n: int, folder: Path) -> list[Any]:
    """Random states of each replica; what is written fails on all ranks, or is refused on all."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    model: Any = autotp.parallelize(llama_in_float64(), 2)
    made = accelerate.Accelerator(cpu=on_cpu(True))
    accelerate.utils.set_seed(7, device_specific=True)
    made.prepare(model)
    made.save_state(str(folder / "state"))
    before = torch.rand(3)
    made.wait_for_everyone()
    made.load_state(str(folder / "state"))
    found: list[Any] = [before.tolist(), torch.rand(3).tolist()]
    if rank == 0:
        (folder / "file").write_text("")
    made.wait_for_everyone()
    arguments = transformers.TrainingArguments(str(folder), report_to=[], use_cpu=on_cpu(True))
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows(4))
    trainer.create_optimizer_and_scheduler(1)
    elsewhere = str(folder / ("state", "state", "nowhere", "nowhere")[rank])
    (folder / "state" / "scheduler.pt").touch()
    made.wait_for_everyone()
    for call in (
        lambda: model.save_pretrained(folder / "file" / "model"),
        lambda: trainer._load_optimizer_and_scheduler(elsewhere),
        trainer.hyperparameter_search,
    ):
        found.append(message(call).splitlines()[0])
    return found


@pytest.mark.rare
def test_replicas_have_random_states_of_their_own_and_one_error(tmp_path: Path) -> None:
    found = run_ranks(beside, 4, tmp_path, timeout=200)
    for rank, (before, after, *told) in enumerate(found):
        assert before == after == found[rank // 2 * 2][0]
        assert "the checkpoint cannot be written" in told[0]
        assert told[1].startswith("replica rank 1 sees other files in ")
        assert told[2].startswith("hyperparameter_search sends the trials of one process to the others")
    assert found[0][0] != found[2][0]
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert {f"random_states_{i}.pkl" for i in range(4)} <= names


def outlived(rank: int, n: int) -> None:
    from torchmetrics import SumMetric

    model = autotp.parallelize(llama_in_float64(), n)
    dist.destroy_process_group()
    count = SumMetric()
    assert count(2.0) == count.compute() == 2.0
    del model


def test_a_model_that_outlives_its_process_group_has_no_replicas() -> None:
    pytest.importorskip("torchmetrics")
    run_ranks(outlived, 2, timeout=100, fresh=True)
