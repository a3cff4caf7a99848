"""attached: state goes with its object, and classes of state do not meet; other state is listed, with a reason."""

from __future__ import annotations

import ast
import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import autotp
from autotp.attached import (
    READ,
    all_attached,
    attach,
    attached,
    attached_if_any,
    detach,
    first_time,
    host_values,
    read_again,
)


class Owner:
    """Stands for a process group or an optimizer."""


@dataclass
class Calls:
    number: int = 0


@dataclass
class Steps:
    number: int = 0


def test_attached_makes_a_state_once_for_each_object_and_class() -> None:
    one, other = Owner(), Owner()
    attached(one, Calls).number += 1
    attached(one, Calls).number += 1
    assert [attached(one, Calls), attached(other, Calls), attached(one, Steps)] == [Calls(2), Calls(0), Steps(0)]


def test_attached_state_goes_with_its_object() -> None:
    owner = Owner()
    attach(owner, Calls(3))
    assert (owner, Calls(3)) in all_attached(Calls)
    del owner
    gc.collect()
    assert Calls(3) not in [calls for _, calls in all_attached(Calls)]


def test_attach_replaces_a_state_and_detach_forgets_it() -> None:
    owner = Owner()
    detach(owner, Calls)
    assert attached_if_any(owner, Calls) is None
    attach(owner, Calls(1))
    assert attach(owner, Calls(2)) is attached_if_any(owner, Calls)
    detach(owner, Calls)
    assert attached_if_any(owner, Calls) is None


def test_attached_asks_for_no_equality_of_states() -> None:
    """A state that is false, such as an empty set, is a state."""
    owner = Owner()
    assert attached(owner, set) is attached(owner, set)


def test_first_time_is_true_once_for_an_object_and_a_value() -> None:
    one, other = Owner(), Owner()
    answers = [first_time(owner, what) for owner in (one, other) for what in ("hook", "hook", 3)]
    assert answers == [True, False, True] * 2


def test_attached_refuses_an_object_without_weak_references() -> None:
    with pytest.raises(TypeError):
        attached(3, Calls)


# ---- what is attached to no object

OF_THE_PROCESS = {
    "what users register": {"rules.registry.RULES", "rules.registry.USER_RULES", "rules.registry._REFERENCES"},
    "functions of upper layers that lower ones call": {
        "distributed.peers.heartbeat._counts", "distributed.peers.heartbeat._looks",
        "distributed.peers.heartbeat._topics", "distributed.peers.heartbeat._waits", "errors._listeners",
        "groups.failures._comparing", "groups.failures._informed", "model_library._MADE", "model_library._REGISTERED",
    },
    "what extensions add: values of options, and rows of tables": {
        "diagnostics.lockstep.COLLECTIVES", "extensions._REGISTERED", "passes.builder.SIZES",
        "passes.check.erase.FORMS", "passes.check.sequence_order.IN_ORDER", "passes.emit.python_calls.BEFORE_CALLS",
        "passes.emit.python_calls.PYTHON_CALLS", "passes.lower.localize.FAST_ONLY", "passes.lower.localize.FORMS",
        "rules.table.ROWS",
    },
    "the region that a thread is in: a region within another has its own": {
        "costs.hardware._estimated", "display.progress._of_threads", "errors._calls", "groups.one_thread._users",
        "integrations.loops.accelerate_state._shown", "integrations.transformers.adapters._making",
        "integrations.transformers.pages.attention_to_pages._cache",
        "integrations.transformers.adapters._saved", "ops.coalesced._at_once",
        "passes.emit.kept_values.kept_call.recomputations", "passes.capture.guards.looks._looking",
        "passes.capture.repeats.record.CALLS", "passes.capture.replacements.opaque._recording",
    },
    "the live models of the process, and what is put back in torch after the last one": {
        "distributed.live_models._models", "distributed.live_models._undo",
    },
    "of the call that runs: its graph begins with forgetting it": {
        "integrations.attention_kernels.flex.flex_attention._BLOCKS"
    },
    "of one backward": {
        "ops.coalesced._before", "ops.coalesced._waits_of_run", "passes.emit.kept_values.kept_call._latest",
    },
    "what other ranks have told, by numbers that no two meshes share": {
        "distributed.peers.in_step._first", "distributed.peers.in_step._progress",
        "runtime.torch_hooks.interrupted._passed", "runtime.torch_hooks.interrupted._waiting",
    },
    "of the process as the system sees it: its card, its sockets and locked files": {
        "checkpoint.files.folder_lock.HELD", "distributed.peers.links._open",
        "distributed.peers.never_ending._captures", "passes.emit.kept_values.stores._streams",
    },
    "looked at in each collective or call, so without `attached`; an entry names its group, which is compared": {
        "groups.failures.uncompared", "groups.process_group._backends", "passes.capture.pytree._SPECS",
    },
    "by identity: tensors have no other equality": {"runtime.shard_parameters._left_behind"},
    "a number is never given out twice": {"passes.capture.unsupported.sizes_as_keys.NEVER_EQUAL"},
    "all that is attached": {"attached._states"},
}  # fmt: skip
"""Why state belongs to the process -> the names of modules that stand for it."""

ROOT = Path(autotp.__file__).resolve().parent.parent
STATES = {
    "ContextVar", "Counter", "WeakKeyDictionary", "WeakSet", "WeakTensorKeyDictionary", "WeakValueDictionary", "count",
    "defaultdict", "deque", "local",
}  # fmt: skip
"""Classes whose objects are made to be changed."""
CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault",
    "update",
}  # fmt: skip


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in (parts[1:] if parts[0] == "autotp" else parts) if part != "__init__")


def names_of_module(tree: ast.Module, module: str) -> dict[str, str]:
    """Name in a module -> the module and name that it stands for, for what it assigns and imports from autotp."""
    names: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "autotp":
            origin = (node.module or "").partition(".")[2]
            names |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if hasattr(node, "target") else []
        names |= {target.id: f"{module}.{target.id}" for target in targets if isinstance(target, ast.Name)}
    return names


def changed(node: ast.AST) -> list[ast.expr]:
    """The expressions whose objects a statement or a call changes."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        return [node.func.value]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [target.value for target in targets if isinstance(target, ast.Subscript | ast.Attribute)]


def states_of(source: str, module: str) -> set[str]:
    """Module and name of each state of the process that a module defines, or changes."""
    tree = ast.parse(source)
    names, states = names_of_module(tree, module), set[str]()
    for node in tree.body:
        value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
        made = value.func if isinstance(value, ast.Call) else None
        made = made.value if isinstance(made, ast.Subscript) else made
        if made is not None and ast.unparse(made).rpartition(".")[2] in STATES:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
            states |= {f"{module}.{ast.unparse(target)}" for target in targets}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    for function in functions:
        local = {
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        local |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                states |= {names[name] for name in node.names}
            for target in changed(node):
                if isinstance(target, ast.Name) and target.id in names.keys() - local:
                    states.add(names[target.id])
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) in names.keys() - local:
                    states.add(f"{names[ast.unparse(target.value)]}.{target.attr}")
    return states


SOURCES = {module_of(p): p.read_text() for top in ("autotp", "passes") for p in (ROOT / top).rglob("*.py")}


@pytest.mark.each_time
def test_state_of_the_process_is_listed_with_its_reason() -> None:
    """New state belongs to an object, and is `attached` to it; or to the process, and then the list says why."""
    states = set[str]().union(*(states_of(source, module) for module, source in SOURCES.items()))
    assert states == set[str]().union(*OF_THE_PROCESS.values())


@pytest.mark.parametrize(
    "source",
    [
        "x = {}\ndef f(): x[1] = 2", "x = []\ndef f(): x.append(1)", "x = 0\ndef f():\n global x\n x = 1",
        "x = set()\nf = lambda: x.add(1)", "x = ContextVar('x')", "x = weakref.WeakKeyDictionary[int, str]()",
        "x: dict[str, int] = {}\ndef f():\n def g():\n  del x['a']",
        "x = C()\ndef f(): x.y = 1", "x = []\ndef f(): x[0] += 1",
    ],
)  # fmt: skip
def test_states_of_finds_what_a_module_changes(source: str) -> None:
    assert states_of(source, "a.b") == {"a.b.x"}


def test_states_of_finds_what_a_module_changes_of_another() -> None:
    assert states_of("from autotp.a import b\ndef f(): b.x.pop(1)", "c") == {"a.b.x"}
    assert states_of("from autotp.a.b import x\ndef f(): x[1] = 2", "c") == {"a.b.x"}
    assert states_of("x = {1: 2}\ndef f(x): x[1] = 3\ndef g():\n x = {}\n x[1] = 2", "a.b") == set()


def test_parts_of_a_known_tensor_are_known() -> None:
    x = torch.arange(12)
    assert READ.of(x[2:5]) is None and host_values(x) == list(range(12))
    assert [READ.of(part) for part in x.chunk(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert READ.of(x[1:][2:4]) == [3, 4]
    assert READ.of(x[::2]) is None and READ.of(x.view(3, 4)) is None and READ.of(x.view(3, 4)[1]) == [4, 5, 6, 7]
    x[5] = 0
    assert READ.of(x) is None and READ.of(x[2:5]) is None and host_values(x[2:5]) == [2, 3, 4]


def test_a_copy_is_known_as_its_tensor_and_a_write_that_torch_does_not_count_is_read_again() -> None:
    x, y = torch.arange(3), torch.arange(2)
    assert read_again([x, y, x]) == [[0, 1, 2], [0, 1], [0, 1, 2]]
    copy = x.clone()
    assert READ.of(copy) is None
    READ.copied(x, copy)
    assert READ.of(copy) == [0, 1, 2]
    x.data[0] = 7
    assert read_again([x]) == [[7, 1, 2]]
