"""accelerate sees the ranks of one model as one process: its loops and files are one device's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from errors import message
from hugging_face import Rows, expect_close, llama_in_float64, on_cpu
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

import autotp

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
STEPS = 6


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([Rows(24)[i] for i in range(24)])


def loop(rank: int, n: int, folder: Path, accelerator_first: bool, stream: bool) -> dict[str, Any]:
    """Accumulates, clips and schedules; saves in the middle, and runs the rest again from there."""
    torch.manual_seed(rank)  # The order of rows is that of the first process.
    made = accelerate.Accelerator(cpu=on_cpu(n > 1), gradient_accumulation_steps=2) if accelerator_first else None
    model: Any = llama_in_float64()
    model = autotp.parallelize(model, n) if n > 1 else model
    made = made or accelerate.Accelerator(cpu=on_cpu(n > 1), gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    rows = torch.utils.data.DataLoader(Stream() if stream else Rows(24), batch_size=2, shuffle=not stream)
    given = (model, optimizer, rows, schedule)
    prepared, optimizer, rows, schedule = made.prepare(*given)
    assert prepared is model and made.num_processes == 1 and made.process_index == 0
    assert not isinstance(prepared, torch.nn.parallel.DistributedDataParallel)
    found: dict[str, Any] = {"log": [], "ids": []}
    batches = list(rows)
    for turn in range(2):
        for i, batch in enumerate(batches):
            if turn and i < 6:
                continue
            if not turn and i == 6:
                made.save_state(str(folder))
            if turn and i == 6:
                made.load_state(str(folder))
            with made.accumulate(model):
                loss = model(**batch).loss
                made.backward(loss)
                norm = made.clip_grad_norm_(model.parameters(), 0.5) if made.sync_gradients else torch.zeros(())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found["log"].append((loss.item(), float(norm), schedule.get_last_lr()[0]))
            found["ids"].append(made.gather_for_metrics(batch["input_ids"]))
            counted = made.reduce(torch.tensor(float(len(batch["labels"]))), "sum"), made.gather(loss.detach()[None])
            assert counted[0] == 2 and counted[1].shape == (1,) and made.gather_for_metrics([rank]) == [rank]
    found["state"] = made.get_state_dict(model)
    made.unwrap_model(model).save_pretrained(
        folder / "model", is_main_process=made.is_main_process, save_function=made.save,
        state_dict=made.get_state_dict(model),
    )  # fmt: skip
    made.wait_for_everyone()
    found["words"] = accelerate.utils.broadcast_object_list([rank])
    found["main"] = made.on_main_process(lambda: rank)()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("accelerator_first", "stream"), [(True, False), pytest.param(False, True, marks=pytest.mark.rare)]
)
def test_accelerate_loop_and_files_are_one_devices(tmp_path: Path, accelerator_first: bool, stream: bool) -> None:
    folders = [tmp_path / it for it in ("one", "two")]
    one = loop(0, 1, folders[0], accelerator_first, stream)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    two = run_ranks(loop, 2, folders[1], accelerator_first, stream, timeout=250, fresh=True)
    for rank in range(2):
        expect_close(two[rank]["log"], one["log"])
        assert all(torch.equal(a.cpu(), b) for a, b in zip(two[rank]["ids"], one["ids"], strict=True))
        assert two[rank]["words"] == [0]
    assert [it["main"] for it in two] == [0, None]
    expect_close(two[0]["state"], one["state"])
    saved = transformers.LlamaForCausalLM.from_pretrained(folders[1] / "model")
    expect_close(saved.state_dict(), one["state"])
    assert {path.name for path in folders[0].iterdir()} <= {path.name for path in folders[1].iterdir()}
    states = [torch.load(folder / "optimizer.bin", weights_only=True) for folder in folders]
    expect_close(states[1], states[0])


def configured(rank: int, n: int) -> list[str]:
    model: Any = autotp.parallelize(llama_in_float64(), n)
    config = accelerate.ParallelismConfig
    made = accelerate.Accelerator(cpu=on_cpu(n > 1), parallelism_config=config(tp_size=n))
    assert made.prepare(model) is model and made.parallelism_config is None
    with pytest.raises(autotp.Error) as raised:
        accelerate.Accelerator(cpu=on_cpu(n > 1), parallelism_config=config(dp_shard_size=n))
    made.free_memory()
    del model
    gc.collect()
    return [str(raised.value).splitlines()[0], str(accelerate.PartialState().num_processes)]


def test_parallelism_config_must_have_the_models_size() -> None:
    """Only tensor parallelism of the model's size; and without a parallel model accelerate counts processes again."""
    told = "the model is parallel over 2 ranks, all processes, and ParallelismConfig says {'dp_shard': 2}"
    assert run_ranks(configured, 2, timeout=120, fresh=True) == [[told, "2"]] * 2


def beside_replicas(rank: int, n: int) -> list[str]:
    """tp=2 of four processes, in a mesh of the user's: the errors, with the model first and with accelerate first."""
    mesh, messages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    model: Any = autotp.parallelize(torch.nn.Linear(4, 6), mesh=mesh["tp"], example_inputs=torch.ones(2, 4))
    messages.append(message(lambda: accelerate.Accelerator(cpu=on_cpu(n > 1))).splitlines()[0])
    del model
    gc.collect()
    made = accelerate.Accelerator(cpu=on_cpu(n > 1))
    assert made.num_processes == 4
    made.set_trigger()
    assert made.check_trigger(), "a flag of all processes"
    with pytest.raises(autotp.Error) as raised:
        autotp.parallelize(torch.nn.Linear(4, 6), mesh=mesh["tp"], example_inputs=torch.ones(2, 4))
    return [*messages, str(raised.value).splitlines()[0]]


def test_replicas_are_not_one_process() -> None:
    told = "accelerate takes each process for a replica, which ranks of a parallel model with a mesh of yours are not"
    assert run_ranks(beside_replicas, 4, timeout=120, fresh=True) == [[told, f"parallelize(Linear): {told}"]] * 4


class Average:
    """An average of weights, as a user writes it."""

    def __init__(self, model: Any, part: Callable[[Any], Any] = lambda p: p.detach().clone()) -> None:
        self.kept = {name: part(p) for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = dict(state)


def registered(rank: int, n: int, folder: Path) -> str:
    """What is alike on the ranks is saved, and an average of cut weights. Plain parts would be the first rank's."""
    model: Any = autotp.parallelize(llama_in_float64(), n)
    made = accelerate.Accelerator(cpu=on_cpu(n > 1))
    made.prepare(model)
    alike = Average(torch.nn.Linear(2, 2).requires_grad_(False))
    alike.kept = {"w": torch.ones(2), "n": 3}
    made.register_for_checkpointing(alike)
    average = Average(model)
    made.register_for_checkpointing(average)
    made.save_state(str(folder / "whole"))
    saved = torch.load(folder / "whole" / "custom_checkpoint_1.pkl", weights_only=True)
    expect_close(saved, {name: p.detach() for name, p in llama_in_float64().named_parameters()})
    for x in average.kept.values():
        x.zero_()
    made.load_state(str(folder / "whole"))
    expect_close(average.kept, saved)
    made.register_for_checkpointing(Average(model, lambda p: p.to_local() if hasattr(p, "to_local") else p))
    return message(lambda: made.save_state(str(folder / "parts"))).splitlines()[0]


def tied(rank: int, n: int, folder: Path) -> dict[str, Any]:
    """A model with tied weights and an optimizer, saved, loaded, and saved again without a step between."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    model: Any = transformers.GPT2LMHeadModel(config).double().eval()
    model = autotp.parallelize(model, n) if n > 1 else model
    made = accelerate.Accelerator(cpu=on_cpu(n > 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    model, optimizer = made.prepare(model, optimizer)
    made.backward(model(**{key: value[None] for key, value in Rows(1)[0].items()}).loss)
    optimizer.step()
    for name in ("first", "second"):
        made.save_state(str(folder / name))
        made.wait_for_everyone()
        made.load_state(str(folder / name))
    return torch.load(folder / "second" / "optimizer.bin", weights_only=True)["state"] if rank == 0 else {}


def test_tied_models_are_saved_as_on_one_device(tmp_path: Path) -> None:
    expected = run_ranks(tied, 1, tmp_path / "one", timeout=120)[0]
    found = run_ranks(tied, 2, tmp_path / "two", timeout=120, fresh=True)[0]
    expect_close(found, expected)
    files = [{x.name for x in (tmp_path / name / "second").iterdir()} for name in ("one", "two")]
    assert "model.safetensors" in files[0] & files[1]


def test_registered_objects_that_differ_are_refused(tmp_path: Path) -> None:
    for told in run_ranks(registered, 2, tmp_path, timeout=120, fresh=True):
        assert told.startswith("save_state: object 2 of register_for_checkpointing, a Average, has another state")


def random_states(rank: int, n: int, folder: Path) -> tuple[list[str], list[float], list[float]]:
    """The names of the files with random states; what this rank draws after saving, and again after loading."""
    model: Any = autotp.parallelize(llama_in_float64(), 2)
    made = accelerate.Accelerator(cpu=on_cpu(n > 1))
    made.prepare(model)
    torch.manual_seed(rank)  # Each rank has another one, as nobody should.
    made.save_state(str(folder))
    drawn = torch.rand(2).tolist()
    made.load_state(str(folder))
    return sorted(path.name for path in folder.glob("random_states*")), drawn, torch.rand(2).tolist()


@pytest.mark.parametrize("n", [2, 4])
def test_random_states_are_those_of_each_replica(tmp_path: Path, n: int) -> None:
    """A file for each process; each rank goes on with the state of its replica's first rank."""
    found = run_ranks(random_states, n, tmp_path, timeout=120, fresh=True)
    for rank, (names, _, again) in enumerate(found):
        assert names == [f"random_states_{i}.pkl" for i in range(n)]
        assert again == found[rank - rank % 2][1]
    for replica, rank in enumerate(range(0, n, 2)):
        state = torch.load(tmp_path / f"random_states_{replica}.pkl", weights_only=False)["torch_manual_seed"]
        assert torch.equal(state, torch.Generator().manual_seed(rank).get_state())


def left_before(rank: int, store: Any, save: Callable[[], Any], what: Any, name: str) -> bool:
    """Whether another rank leaves `save` before the first rank has written by `what.name`, which waits for that."""
    theirs, left, key = getattr(what, name), list[bool](), f"{name} {uuid4()}"
    held = [key]
    dist.broadcast_object_list(held, 0)

    def late(*args: Any, **kwargs: Any) -> Any:
        try:
            store.wait(held, timedelta(seconds=1))
            left.append(True)
        except RuntimeError:
            pass  # Nobody has left.
        return theirs(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(what, name, late)
        save()
    if rank:
        store.set(held[0], "left")
    return bool(left)


def there_for_all(rank: int, n: int, folder: Path) -> tuple[Any, ...]:
    """The files are there when a rank leaves; where the first rank cannot write, all are told."""
    model: Any = autotp.parallelize(llama_in_float64(), n)
    made, store = accelerate.Accelerator(cpu=on_cpu(n > 1)), dist.distributed_c10d._get_default_store()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = made.prepare(model, optimizer)
    found: list[Any] = []
    for call in (made.save_state, lambda path: made.save_model(model, path)):
        path = str(folder / str(len(found)))
        found.append(left_before(rank, store, partial(call, path), accelerate.utils.other, "safe_save_file"))
        assert (Path(path) / "model.safetensors").exists()
    made.load_state(str(folder / "0"))
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            str(folder / "trainer"), report_to=[], use_cpu=on_cpu(n > 1), save_strategy="no"
        ),
    )
    trainer.create_optimizer_and_scheduler(1)
    by_trainer = partial(trainer._save_checkpoint, model, None)
    found.append(left_before(rank, store, by_trainer, transformers.trainer.TrainerState, "save_to_json"))
    assert (folder / "trainer" / "checkpoint-0" / "trainer_state.json").exists()
    for call in (made.save_state, lambda path: made.save_model(model, path), trainer.save_model):
        with pytest.MonkeyPatch.context() as patch:
            for what, name in ((accelerate.utils.other, "safe_save_file"), (trainer, "_save")):
                patch.setattr(what, name, full) if rank == 0 else None
            with pytest.raises(autotp.Error if rank else OSError) as raised:
                call(str(folder / "full"))
        found.append(str(raised.value).splitlines()[0])
    return tuple(found)


def full(*_: Any, **__: Any) -> None:
    raise OSError("no space left")


@pytest.mark.timeout(200)
def test_files_are_there_for_all(tmp_path: Path) -> None:
    told = [("no space left",) * 3, ("OSError: no space left",) * 3]
    expected = [(False, False, False, *texts) for texts in told]
    assert run_ranks(there_for_all, 2, tmp_path, timeout=150, fresh=True) == expected


def first_on_a_cpu(rank: int, n: int) -> None:
    """Nobody says `cpu=True`: accelerate then does not look for other processes, and each would be the first."""
    for accelerator_first in (True, False):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        made = accelerate.Accelerator() if accelerator_first else None
        model: Any = autotp.parallelize(llama_in_float64(), n)
        made = made or accelerate.Accelerator()
        assert made.prepare(model) is model
        assert (made.num_processes, made.process_index, made.is_main_process) == (1, 0, rank == 0)
        arguments = transformers.TrainingArguments("nowhere", report_to=[])
        assert (arguments.world_size, arguments.should_save, arguments.should_log) == (1, rank == 0, rank == 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate finds the processes")
def test_the_first_rank_is_known_on_a_cpu() -> None:
    run_ranks(first_on_a_cpu, 2)
