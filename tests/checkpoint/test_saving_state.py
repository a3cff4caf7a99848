"""What of a training's state is saved, and what is refused: names of parameters, state beside them, replicas, steps."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from errors import message
from ranks import run_ranks
from torch.optim import SGD, AdamW, adam
from torch.optim.lr_scheduler import StepLR
from trainers import Layout, edited, started, trained

import autotp
from autotp.checkpoint.save import Saving, saved_steps
from autotp.models.gpt import GPT, GPTConfig


def problem(call: Callable[[], Any]) -> str:
    return message(call).splitlines()[0]


# ---- an optimizer of named parameters


def with_names(rank: int, n: int, folder: str) -> None:
    """Saved in one layout, loaded in it and in others; each keeps the names of its own parameters."""
    for source in ((2, 1, 1), (1, 2, 1)):
        trainer, _ = started(source)
        optimizer = AdamW(trainer.named_parameters(), lr=0.01)
        trained(trainer, optimizer, range(1))
        where = Path(folder, str(source))
        autotp.save_checkpoint(where, trainer, optimizer, 1)
        for target in ((2, 1, 1), (1, 2, 1)):
            trainer, _ = started(target)
            other = AdamW(trainer.named_parameters(), lr=0.5)
            own = list(other.param_groups[0]["param_names"])
            assert autotp.load_checkpoint(where, trainer, other) == 1
            assert other.param_groups[0]["param_names"] == own
            assert other.param_groups[0]["lr"] == 0.01


def test_loaded_optimizers_keep_their_own_parameter_names(tmp_path: Path) -> None:
    run_ranks(with_names, 2, str(tmp_path), timeout=100)


# ---- a model whose state_dict() is not its parameters and buffers


class ExtraState(GPT):
    """Has state that is no tensor of the model."""

    def get_extra_state(self) -> Any:
        return torch.ones(3)

    def set_extra_state(self, state: Any) -> None:
        """Nothing of it is used."""


class LeavesOut(GPT):
    """Does not save what it learns."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: x for name, x in super().state_dict(*args, **kwargs).items() if "mlp" not in name}


def other_states(rank: int, n: int, folder: str) -> list[str]:
    config, found = GPTConfig(block_size=8, vocab_size=49, n_layer=2, n_head=4, n_embd=16, dropout=0.0), list[str]()
    for kind in (ExtraState, LeavesOut):
        trainer, optimizer = started((2, 1, 1), model=kind(config))
        found.append(problem(lambda: autotp.save_checkpoint(folder, trainer, optimizer, 1)))  # noqa: B023  Called here.
        trained(trainer, optimizer, range(1))
        autotp.clip_grad_norm_(trainer, 1.0)
    model = autotp.parallelize(ExtraState(config), tp=2)
    found.append(problem(lambda: autotp.full_state_dict(model)))
    assert not saved_steps(folder)
    return found


def test_save_refuses_a_state_dict_unlike_the_parameters(tmp_path: Path) -> None:
    beside = "`_extra_state` in the model's state_dict() is not a dense parameter or buffer of the model"
    for found in run_ranks(other_states, 2, str(tmp_path), timeout=100):
        assert found == [
            f"save_checkpoint: {beside}",
            "save_checkpoint: `h.0.mlp.c_fc.weight` is trained, but is not in the model's state_dict(): "
            "it would not be saved",
            f"full_state_dict: {beside}",
        ]


# ---- a folder that cannot be read


def unreadable(rank: int, n: int, folder: str) -> list[str]:
    trainer, optimizer = started((2, 1, 1))
    file, scandir = Path(folder, "file"), os.scandir
    file.touch()
    assert autotp.load_checkpoint(Path(folder, "nothing"), trainer, optimizer) == 0
    found = [problem(lambda: autotp.load_checkpoint(file, trainer, optimizer))]

    def denied(path: Any = ".") -> Any:
        if Path(path) == Path(folder):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    os.scandir = denied  # type: ignore[assignment]
    return [*found, problem(lambda: autotp.load_checkpoint(folder, trainer, optimizer))]


def test_load_names_the_folder_that_cannot_be_read(tmp_path: Path) -> None:
    for found in run_ranks(unreadable, 2, str(tmp_path), timeout=100):
        assert found == [
            f"load_checkpoint: {tmp_path}/file cannot be read: Not a directory",
            f"load_checkpoint: {tmp_path} cannot be read: Permission denied",
        ]


def test_saved_steps_names_the_step_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-00000001").mkdir()

    def denied(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "lstat", denied)
    assert problem(lambda: saved_steps(tmp_path)) == f"{tmp_path}/step-00000001 cannot be read: Permission denied"


def test_saved_steps_passes_over_numbers_of_no_step(tmp_path: Path) -> None:
    """Numbers that no step has are passed over."""
    for name in ("step-" + "9" * 30, "step-0000000010", "step-" + "\u0661" * 8, "step-00000007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    assert saved_steps(tmp_path) == [7]


# ---- state that has no place in a checkpoint


class Beside(SGD):
    """Keeps a number under a text, as torch allows."""

    def step(self, closure: Any = None) -> Any:
        self.state["global"] = {"n": 1}  # type: ignore[index]
        return super().step(closure)


class InDict(SGD):
    """Keeps a number of its own in its state dict."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "k": 3}


class OwnNumbers(SGD):
    """Keeps of each parameter a number of what this rank has of it."""

    tensor = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            found = part.detach().norm()
            self.state[parameter]["rms"] = found if self.tensor else found.item()


class OwnTensors(OwnNumbers):
    tensor = True


class OwnLists(SGD):
    """Keeps a list of tensors of each parameter, which is cut as it is."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["past"] = [torch.zeros_like(parameter)]


def refused(rank: int, n: int, folder: str) -> list[str]:
    found = []
    for i, kind in enumerate((Beside, InDict, OwnNumbers, OwnTensors, OwnLists)):
        trainer, _ = started((2, 1, 1))
        optimizer: Any = kind(trainer.parameters(), lr=0.01)
        trained(trainer, optimizer, range(1))
        where = Path(folder, str(i))
        found.append(problem(lambda: autotp.save_checkpoint(where, trainer, optimizer, 1)))  # noqa: B023
        assert saved_steps(where) == []
    trainer, optimizer = started((2, 1, 1))
    found.append(problem(lambda: autotp.save_checkpoint(folder, trainer, optimizer, 2**63)))
    return found


def test_save_refuses_optimizer_state_beside_its_parameters(tmp_path: Path) -> None:
    first, other = run_ranks(refused, 2, str(tmp_path), timeout=100)
    assert first == other
    assert first[:2] == [
        "save_checkpoint: Beside keeps `global` beside the state of its parameters, which a checkpoint cannot hold",
        "save_checkpoint: InDict keeps `k` beside the state of its parameters, which a checkpoint cannot hold",
    ]
    for text in first[2:4]:
        assert text.startswith("save_checkpoint: global rank 1 has another `rms` of `")
        assert text.endswith("` in the optimizer than global rank 0")
    assert first[4].startswith("save_checkpoint: `past` of `")
    assert first[5] == f"save_checkpoint: step={2**63} is not a number of steps"


def drifted(rank: int, n: int, folder: str) -> str:
    trainer, optimizer = started((1, 1, 2))
    trained(trainer, optimizer, range(1))
    autotp.save_checkpoint(folder, trainer, optimizer, 1)
    with torch.no_grad():
        dict(trainer.named_parameters())["h.1.ln_2.weight"][3] += 1e-6 * rank
    found = problem(lambda: autotp.save_checkpoint(folder, trainer, optimizer, 2))
    assert saved_steps(folder) == [1]
    return found


def test_save_refuses_replicas_that_differ(tmp_path: Path) -> None:
    text = "save_checkpoint: global rank 1 has another `h.1.ln_2.weight` than global rank 0"
    assert run_ranks(drifted, 2, str(tmp_path), timeout=100) == [text] * 2


# ---- an optimizer of fewer parameters than the saved one


def loaded_in_part(rank: int, n: int, folder: str) -> None:
    """The state that is left behind is named; what an optimizer never had is not."""
    trainer, optimizer = started((2, 1, 1))
    trained(trainer, optimizer, range(1))
    autotp.save_checkpoint(folder, trainer, optimizer, 1)
    trainer, _ = started((2, 1, 1))
    some = torch.optim.AdamW([p for name, p in trainer.named_parameters() if "ln_f" not in name], lr=0.01)
    told = "also has the optimizer's state of ln_f.weight, ln_f.bias, which is not loaded: these parameters are not in"
    with pytest.warns(UserWarning, match=re.escape(told)):
        autotp.load_checkpoint(folder, trainer, some)
    trained(trainer, some, range(1, 2))
    autotp.save_checkpoint(folder, trainer, some, 2)
    assert autotp.load_checkpoint(folder, trainer, some) == 2  # Nothing is said.


def test_loading_an_optimizer_of_fewer_parameters_warns(tmp_path: Path) -> None:
    run_ranks(loaded_in_part, 2, str(tmp_path), timeout=100)


# ---- groups of which a stage of the pipeline has no parameter


def in_groups(layout: Layout) -> tuple[autotp.Trainer, Any, StepLR]:
    trainer, _ = started(layout)
    named = list(trainer.named_parameters())
    groups = [{"params": [p for name, p in named if ("wpe" in name) is first]} for first in (True, False)]
    optimizer = torch.optim.AdamW([groups[0] | {"lr": 0.02}, groups[1]], lr=0.01)
    return trainer, optimizer, StepLR(optimizer, 1, 0.5)


def resumed(rank: int, n: int, folder: str) -> None:
    """Their options are loaded as on the other ranks: a schedule multiplies them, and is saved anew."""
    trainer, optimizer, schedule = in_groups((1, 2, 1))
    assert [not group["params"] for group in optimizer.param_groups] == [bool(rank), False]
    for step in range(2):
        trained(trainer, optimizer, range(step, step + 1))
        schedule.step()
    with pytest.raises(autotp.Error, match="`changed` is an argument of load_checkpoint"):
        autotp.save_checkpoint(folder, trainer, optimizer, 2, **{"changed": schedule})
    autotp.save_checkpoint(folder, trainer, optimizer, 2, schedule=schedule)
    trainer, optimizer, schedule = in_groups((1, 2, 1))
    told = "step-00000002 also has schedule, which is not loaded: load_checkpoint(..., schedule=...)"
    with pytest.warns(UserWarning, match=re.escape(told)):
        autotp.load_checkpoint(folder, trainer, optimizer)
    assert autotp.load_checkpoint(folder, trainer) == 2  # To evaluate: nothing is said.
    trainer, optimizer, schedule = in_groups((1, 2, 1))
    assert autotp.load_checkpoint(folder, trainer, optimizer, schedule=schedule) == 2
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.0025]
    trained(trainer, optimizer, range(2, 3))
    schedule.step()
    assert schedule.get_last_lr() == [0.0025, 0.00125]
    autotp.save_checkpoint(folder, trainer, optimizer, 3, schedule=schedule)


def test_empty_groups_of_a_stage_load_their_options(tmp_path: Path) -> None:
    run_ranks(resumed, 2, str(tmp_path), timeout=100)


# ---- options that are of another kind than the optimizer's

OPTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "`lr` is 'a'": lambda options: options.update(lr="a"),
    "`lr` is nan": lambda options: options.update(lr=float("nan")),
    "`betas` is [0.9, 0.95, 1]": lambda options: options.update(betas=[0.9, 0.95, 1]),
    "`betas` is 0.9": lambda options: options.update(betas=0.9),
    "`lr` is True": lambda options: options.update(lr=True),
    f"`lr` is {10**400}": lambda options: options.update(lr=10**400),
    "`amsgrad` is 'no'": lambda options: options.update(amsgrad="no"),
    "`eps` is missing": lambda options: options.pop("eps"),
    "is not valid: RuntimeError": lambda options: options.update(lr={"": "tensor", "of": "model|wte.weight"}),
}


def resealed(rank: int, n: int, folder: str) -> list[str]:
    trainer, optimizer = started((1, 1, 1))
    trained(trainer, optimizer, range(1))
    found = []
    for i, change in enumerate([*OPTIONS.values(), None]):
        where = Path(folder, str(i))
        autotp.save_checkpoint(where, trainer, optimizer, 1)

        def edit(content: dict[str, Any], change: Any = change) -> None:
            for group in content["about"]["groups"]:
                if change is None:
                    group[0] = [1, 2]
                else:
                    change(group[0])

        edited(where / "step-00000001", edit)
        found.append(problem(lambda: autotp.load_checkpoint(where, trainer, optimizer)))  # noqa: B023
    assert optimizer.param_groups[0]["lr"] == 0.01
    return found


def test_load_refuses_optimizer_options_of_wrong_types(tmp_path: Path) -> None:
    (found,) = run_ranks(resealed, 1, str(tmp_path), timeout=100)
    for text, expected in zip(found, OPTIONS, strict=False):
        assert expected in text, text
    assert "is not valid" in found[-1]


# ---- in the middle of a step


def in_a_step(rank: int, n: int, folder: str) -> list[str]:
    """What a handler is told that saves or loads while half of the parameters are changed, in a step, or in a save."""
    trainer, optimizer = started((2, 1, 1))
    trained(trainer, optimizer, range(1))
    autotp.save_checkpoint(folder, trainer, optimizer, 1)
    found, single = list[str](), adam._single_tensor_adam

    def interrupt() -> None:
        found.append(problem(lambda: autotp.save_checkpoint(folder, trainer, optimizer, 2)))
        found.append(problem(lambda: autotp.load_checkpoint(folder, trainer, optimizer)))

    def halves(params: list[torch.Tensor], *lists: Any, **options: Any) -> None:
        half = len(params) // 2
        single(params[:half], *(some[:half] for some in lists), **options)
        interrupt()
        single(params[half:], *(some[half:] for some in lists), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "_single_tensor_adam", halves)
        trained(trainer, optimizer, range(1, 2))
    hook = next(trainer.parameters()).register_post_accumulate_grad_hook(lambda _: interrupt())
    trained(trainer, optimizer, range(2, 3))
    hook.remove()
    optimizer.register_step_post_hook(lambda *_: autotp.save_checkpoint(folder, trainer, optimizer, trainer.steps))
    trained(trainer, optimizer, range(3, 4))  # Behind the step, all is changed.
    assert saved_steps(folder) == [1, 4]
    with pytest.MonkeyPatch.context() as patch:

        def result(saving: Saving) -> None:
            patch.undo()
            interrupt()
            saving.result()

        patch.setattr(Saving, "result", result)
        autotp.save_checkpoint(folder, trainer, optimizer, 5)
    assert saved_steps(folder) == [1, 4, 5]
    return found


def test_checkpoints_are_refused_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Such as a signal's handler: a job that is ended gets one at any time."""
    for found in run_ranks(in_a_step, 2, str(tmp_path), timeout=100):
        assert found == [
            f"{call}: it was called in {step}, which was not at its end"
            for step in ("AdamW.step", "Trainer.step", "save_checkpoint")
            for call in ("save_checkpoint", "load_checkpoint")
        ]


# ---- in another thread


def in_threads(rank: int, n: int, folder: str) -> list[str]:
    """What a thread is told that saves or loads while another one trains; a thread after the last one may."""
    trainer, optimizer = started((2, 1, 1))
    found = list[str]()

    def thread(name: str, run: Callable[[], Any]) -> None:
        other = Thread(target=run, name=name)
        other.start()
        other.join()

    thread("first", lambda: trained(trainer, optimizer, range(1)))
    thread("second", lambda: autotp.save_checkpoint(folder, trainer, optimizer, 1))  # The first has ended.
    trained(trainer, optimizer, range(1, 2))
    thread("third", lambda: found.append(problem(lambda: autotp.save_checkpoint(folder, trainer, optimizer, 2))))
    thread("third", lambda: found.append(problem(lambda: autotp.load_checkpoint(folder, trainer, optimizer))))
    autotp.save_checkpoint(folder, trainer, optimizer, 3, wait=False).result()
    assert saved_steps(folder) == [1, 3]
    return found


def test_checkpoints_are_refused_in_a_second_thread(tmp_path: Path) -> None:
    """It would save parameters of two steps, as the other thread changes them meanwhile."""
    for found in run_ranks(in_threads, 2, str(tmp_path), timeout=100):
        assert found == [
            f"{call}: thread 'third' called it, and thread 'MainThread' trains"
            for call in ("save_checkpoint", "load_checkpoint")
        ]
