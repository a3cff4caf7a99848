"""Writes docs/refused.md from the source: each message with which autotp refuses a model, and what to write instead.

python docs/refused.py

The messages are the first arguments of `Error(...)` in the modules of SCOPE, and `fix=` says what to write. What an
f-string fills in is HOLE. A name is followed to what is assigned to it, a parameter to what the callers of the function
give, a call to what the function returns. Only the introduction and the headings are written here.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_suffix(".md")
OWN = "Mistakes of autotp"
SECTIONS = {
    "The launch": (
        "autotp/distributed/mesh.py:_too_few", "autotp/distributed/mesh.py:_check_world",
        "autotp/training/distribute.py:_mesh", "autotp/distributed/mesh.py", "autotp/distributed/agreement.py",
        "autotp/runtime/graph_digest.py",
    ),
    "Inputs and arguments": (
        "passes/capture/example_inputs.py", "passes/plan/choose.py", "passes/plan/user_cuts.py",
        "passes/program/planned.py:matched",
        "autotp/arguments.py", "autotp/options.py", "autotp/experimental", "passes/emit/recompute.py",
        "passes/capture/pytree.py", "passes/capture/capture.py",
    ),
    "Values of tensors": (
        "passes/capture/unsupported/tensor_values.py", "passes/capture/guards/values.py",
        "passes/capture/guards/input_values.py",
    ),
    "What torch.export cannot trace": ("passes/capture/unsupported/explain_failure.py", "passes/capture/inline.py"),
    "Random numbers": (
        "passes/capture/guards/gradient_queries.py", "passes/capture/guards/random_numbers.py",
        "autotp/distributed/mesh.py:follow_first_numpy_state",
    ),
    "What forward writes and reads": (
        "passes/canonicalize", "passes/capture/capture.py:_tried", "passes/capture/guards",
        "passes/capture/python_state",
        "passes/capture/flatten.py", "passes/capture/replacements", "passes/capture/exported_program.py",
        "passes/capture/unsupported/conversions.py",
    ),
    "The model is not an ordinary model": (
        "autotp/runtime/build.py", "autotp/runtime/torch_hooks/wrappers.py", "passes/capture/skeleton.py",
        "autotp/runtime/holdings.py", "passes/emit/rank_program.py",
    ),
    "Operators": (
        "autotp/rules", "passes/lower/prove_rules.py", "passes/canonicalize/autocast.py", "autotp/ops/experts.py",
        "passes/lower/lower.py:_expect_dense_gradient", "passes/lower/local_sizes.py",
    ),
    "Hooks and gradients of your own": (
        "passes/capture/unsupported/lost_gradients.py", "passes/capture/python_state/attribute_writes.py:hooks_added",
        "autotp/runtime/torch_hooks/gradient_nodes.py", "passes/capture/autograd_functions.py",
        "passes/canonicalize/custom_vjp.py", "autotp/ops/custom_vjp.py",
    ),
    "Cut parameters and outputs, outside of the model": ("autotp/distributed/cut_tensors",),
    "Models on meta": ("autotp/deferred_init",),
    "Only with distribute": ("passes/program/loss_only.py", "passes/pipeline", "autotp/training"),
    "Only with cp": ("passes/program/sequences.py:with_cut_sequences", "autotp/runtime/graph_digest.py:same_order"),
    "Only with compile_blocks": ("passes/emit",),
    "Only with estimate and search": ("autotp/tools/estimation", "autotp/tools/page"),
    OWN: (
        "passes/check", "passes/lower", "autotp/experimental/batch_halves/two_halves.py",
        "passes/capture/guards/sizes.py", "autotp/compiler.py:_expect_no_assumptions",
    ),
}  # fmt: skip
"""Heading -> the modules, or functions of them, whose messages it has, in the order of the page.

The longest path counts. The page does not show those of OWN.
"""
SCOPE = (
    "passes", "autotp/rules", "autotp/deferred_init", "autotp/api.py", "autotp/arguments.py", "autotp/compiler.py",
    "autotp/options.py", "autotp/experimental", "autotp/ops/custom_vjp.py", "autotp/ops/experts.py",
    "autotp/runtime/build.py", "autotp/runtime/graph_digest.py", "autotp/runtime/holdings.py",
    "autotp/runtime/torch_hooks/wrappers.py",
    "autotp/runtime/torch_hooks/gradient_nodes.py", "autotp/distributed/mesh.py", "autotp/distributed/agreement.py",
    "autotp/distributed/cut_tensors", "autotp/distributed/gather.py",
    "autotp/training/distribute.py", "autotp/training/compute_dtype.py", "autotp/training/model_settings.py",
    "autotp/training/original_model.py",
    "autotp/training/pipeline/schedules.py", "autotp/training/pipeline/halved_backward.py",
    "autotp/tools/estimation", "autotp/tools/page", "autotp/errors.py", "autotp/integrations/transformers/library.py",
)  # fmt: skip
"""What runs before the first step of a model is computed, and where advice comes from."""
HOLE = "\0"
EXPECTED = "what the error lists behind `expected`"
AGAIN = "what the error says behind `try`"
"""Of an error that is raised again, with its own advice."""
MARKUP = re.compile(r"[*{}|]|(?<!\w)_+|_+(?!\w)")
"""What markdown would take for its own."""
FACTS = {"Fact": 2, "text_fact": 3}
"""What makes a fact that ranks must have alike -> where its problem is among the arguments; `fix` is the next one."""
ELSEWHERE = (HOLE, f"{HOLE} than {HOLE}", f"{HOLE} than rank 0")
"""Messages of a function whose callers say all of it: another rank, or modules that run later."""
TELLING = 6
"""So many letters tell a message from others."""
ARGUMENT = re.compile(rf"[\w{HOLE}]+={HOLE}")
"""How a message about the value of one argument begins. It says which values there are, and the page leaves it out."""
INTRODUCTION = """
# My model was refused

autotp computes the same as one device, or it raises one `autotp.Error`, on every rank, before anything is changed. This
page has the messages that come before the first step, each with what its error says behind `try`. (There may be more
behind `or`.) Search for a few words of your message; `...` stands for what differs. Errors about one argument, such as
`tp=0`, say which values there are, and are not listed.

## Read the message

The first line is the call and the problem. `at` is the line of your model, `try` is what to write instead. Under torchrun
each rank prints the error, and torchrun's summary repeats it: look for the last `autotp.Error:`.

```python
import torch
from torch import nn

import autotp


class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):  # x: [batch 16]
        h = self.up(x).relu()
        while h.max() > 6:
            h = h / 2
        return self.down(h)


x = torch.ones(4, 16)
try:
    autotp.explain(Halved(), tp=2, example_inputs=x)
except autotp.Error as error:
    print(error)
```

```
explain(Halved, tp=2): the model has a loop whose length depends on the values of a tensor: torch.export has no such loop
  at       refused.py:14  while h.max() > 6:
  try      do all rounds, and mask with torch.where; or one operator: torch.library.custom_op with register_fake and register_autograd, and autotp.rule
```

```python
class Scaled(Halved):
    def forward(self, x):
        h = self.up(x).relu()
        rounds = (h.max() / 6).log2().ceil().clamp(min=0)
        return self.down(h / 2**rounds)


print(autotp.verify(Scaled(), tp=2, example_inputs=x).ok)
```

```
True
```

`explain` and `verify` need one process and no GPU, so you can try a change in seconds. From the command line:
`autotp plan file.py:factory --tp 2`. If there is nothing to write instead, you have two ways:

- An operator of your own (`torch.library.custom_op`) may do anything inside. `autotp.rule` says how it can be cut; an
  operator without a rule gets whole tensors.
- Take the part out of the model: compute it in the training loop, and pass the result as an argument.

An error that asks for "a report" is a mistake of autotp, found by a check before a graph runs: nothing wrong was
computed. Until it is mended, `without=("overlap",)` or another pass of [performance.md](performance.md) may go round it.
For a report, open an issue where you cloned autotp from. Put in the error with `AUTOTP_TRACEBACK=full` in the
environment, which shows the lines of autotp, what `autotp doctor` prints, and the smallest model that gives the message.
"""  # noqa: E501
Definition = ast.FunctionDef


@dataclass(frozen=True)
class Frame:
    """A function, and the call that gives its arguments, if it is known.

    Attributes:
        file: where the function is.
        function: its definition.
        call: what calls it.
        caller: the function in which the call is.
    """

    file: Path
    function: Definition
    call: ast.Call | None = None
    caller: Frame | None = None

    @property
    def outermost(self) -> Frame:
        """The last of the callers."""
        return self if self.caller is None else self.caller.outermost

    def above(self, function: Definition) -> bool:
        """Whether a function is this one or one of its callers."""
        return self.function is function or (self.caller is not None and self.caller.above(function))


@dataclass(frozen=True)
class Message:
    """A message with what to write instead; HOLE for what is filled in.

    Attributes:
        module: the module that says it, relative to ROOT, and the function.
        line: where its Error is made.
        text: the message.
        ways: what to write instead: one or the other.
    """

    module: str
    line: int
    text: str
    ways: tuple[str, ...]


# ---- the source


def files() -> list[Path]:
    """The modules of SCOPE."""
    found = [ROOT / name for name in SCOPE]
    return [file for path in found for file in ([path] if path.suffix else sorted(path.rglob("*.py")))]


@cache
def tree(file: Path) -> ast.Module:
    """A module, parsed once."""
    return ast.parse(file.read_text())


@cache
def functions() -> dict[str, list[tuple[Path, Definition]]]:
    """Name -> the functions of this name."""
    found: dict[str, list[tuple[Path, Definition]]] = {}
    for file in files():
        for node in ast.walk(tree(file)):
            if isinstance(node, Definition):
                found.setdefault(node.name, []).append((file, node))
    return found


@cache
def constants() -> dict[str, list[tuple[Path, ast.expr]]]:
    """Name -> the values that modules of the source assign to it."""
    found: dict[str, list[tuple[Path, ast.expr]]] = {}
    for file in files():
        for node in tree(file).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, []).append((file, node.value))
    return found


def called(node: ast.Call) -> str:
    """The name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@cache
def every_call() -> dict[str, list[tuple[Path, Definition, ast.Call]]]:
    """Name -> the calls of this name, each in the innermost function that makes it."""
    found: dict[int, tuple[Path, Definition, ast.Call]] = {}
    for file, function in itertools.chain.from_iterable(functions().values()):
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                before = found.get(id(node))
                if before is None or before[1].lineno < function.lineno:
                    found[id(node)] = file, function, node
    by_name: dict[str, list[tuple[Path, Definition, ast.Call]]] = {}
    for call in found.values():
        by_name.setdefault(called(call[2]), []).append(call)
    return by_name


def callers(file: Path, function: Definition) -> list[tuple[Path, Definition, ast.Call]]:
    """The calls of a function: of a private one, those of its module."""
    found = every_call().get(function.name, [])
    return [call for call in found if call[0] == file or not function.name.startswith("_")]


def assigned(function: Definition, name: str, before: int) -> list[ast.expr]:
    """What was last assigned to a local variable above a line."""
    return [value for value in assignments(function).get(name, ()) if value.lineno < before][-1:]


@cache
def assignments(function: Definition) -> dict[str, list[ast.expr]]:
    """Name of a local variable -> what is assigned to it, from the first line to the last."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                for name, value in pairs:
                    if isinstance(name, ast.Name):
                        found.setdefault(name.id, []).append(value)
        if isinstance(node, ast.NamedExpr):
            found.setdefault(node.target.id, []).append(node.value)
    return {name: sorted(values, key=lambda value: value.lineno) for name, values in found.items()}


def parameters(function: Definition) -> list[str]:
    """The names of a function's parameters."""
    args = function.args
    return [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def given(frame: Frame, name: str) -> tuple[ast.expr, Frame] | None:
    """What a call gives for a parameter of its function, or its default, and the function where this is written."""
    args, call = frame.function.args, frame.call
    if call is None or frame.caller is None:
        return None
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    by_name = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in by_name:
        return by_name[name], frame.caller
    at = names.index(name) - (names[:1] == ["self"]) if name in names else len(call.args)
    if 0 <= at < len(call.args):
        return call.args[at], frame.caller
    defaults = dict(zip(names[::-1], args.defaults[::-1], strict=False))
    return (defaults[name], frame) if name in defaults else None


# ---- texts


def texts(node: ast.expr | None, frame: Frame, seen: tuple[str, ...] = ()) -> list[str]:
    """The texts that an expression may be."""
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else HOLE]
    if isinstance(node, ast.IfExp):
        return either(texts(node.body, frame, seen) + texts(node.orelse, frame, seen))
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        return either([text for value in node.values for text in texts(value, frame, seen)])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [a + b for a in texts(node.left, frame, seen) for b in texts(node.right, frame, seen)]
    if isinstance(node, ast.FormattedValue):
        return texts(node.value, frame, seen) if isinstance(node.value, ast.Name) else [HOLE]
    if isinstance(node, ast.JoinedStr):
        parts = [texts(part, frame, seen) for part in node.values]
        return ["".join(words) for words in itertools.product(*parts)]
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "rstrip":
            return texts(node.func.value, frame, seen)
        return either([text for value, inner in returned(node, frame) for text in texts(value, inner, seen)]) or [HOLE]
    if isinstance(node, ast.Name) and node.id not in seen:
        if values := assigned(frame.function, node.id, node.lineno):
            return [text for value in values for text in texts(value, frame, (*seen, node.id))]
        if node.id in parameters(frame.function):
            found = given(frame, node.id)
            return [HOLE] if found is None else [text or HOLE for text in texts(found[0], found[1], seen)]
        found_constants = constants().get(node.id, [])
        return texts(found_constants[0][1], frame, (*seen, node.id)) if len(found_constants) == 1 else [HOLE]
    return [HOLE]


def either(found: Sequence[str]) -> list[str]:
    """Texts without those that say nothing, if others say something."""
    return [text for text in dict.fromkeys(found) if text.replace(HOLE, "")] or [HOLE]


def returned(call: ast.Call, frame: Frame) -> list[tuple[ast.expr, Frame]]:
    """What a function of the source returns in a call."""
    name = called(call)
    found = [x for x in functions().get(name, []) if x[0] == frame.file] or functions().get(name, [])
    if len(found) != 1 or frame.above(found[0][1]):
        return []
    inner = Frame(*found[0], call, frame)
    returns = [node for node in ast.walk(inner.function) if isinstance(node, ast.Return)]
    return [(node.value, inner) for node in returns if node.value is not None]


def entry(node: ast.expr | None, key: str, frame: Frame) -> list[str]:
    """The texts of an entry of a dictionary that an expression may be."""
    if isinstance(node, ast.IfExp):
        return entry(node.body, key, frame) + entry(node.orelse, key, frame)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [text for k, v in pairs if isinstance(k, ast.Constant) and k.value == key for text in texts(v, frame)]
    if isinstance(node, ast.Call):
        return [text for value, inner in returned(node, frame) for text in entry(value, key, inner)]
    if isinstance(node, ast.Name):
        return [text for value in assigned(frame.function, node.id, node.lineno) for text in entry(value, key, frame)]
    return []


def ways(call: ast.Call, frame: Frame) -> Iterator[str]:
    """What an Error says is to be written instead."""
    found = list(fact(call, "fix", frame))
    found = found or [EXPECTED if text == HOLE else text for text in fact(call, "expected", frame)]
    if not found and any(x.arg is None and isinstance(x.value, ast.Attribute) for x in call.keywords):
        found = [AGAIN]
    yield from (open_at(text) for text in found if text != HOLE)


def fact(call: ast.Call, label: str, frame: Frame) -> Iterator[str]:
    """The texts that an Error gets under a name."""
    for keyword in call.keywords:
        if keyword.arg is None:
            yield from entry(keyword.value, label, frame)
        elif keyword.arg == label == "expected" and isinstance(keyword.value, ast.Call):
            yield HOLE
        elif keyword.arg == label:
            yield from texts(keyword.value, frame)


# ---- messages


def carried(node: ast.expr | None, frame: Frame, seen: tuple[str, ...] = ()) -> set[str]:
    """The parameters of a function whose text is a part of an expression's."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.BoolOp | ast.JoinedStr | ast.Dict):
        parts = node.values
    elif isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.FormattedValue):
        parts = [node.value]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "rstrip":
        parts = [node.func.value]
    elif isinstance(node, ast.Name) and node.id not in seen:
        parts = assigned(frame.function, node.id, node.lineno)
        if not parts and node.id in parameters(frame.function):
            return {node.id} if is_text(frame.file, frame.function, node.id) else set()
        seen = (*seen, node.id)
    return {name for part in parts for name in carried(part, frame, seen)}


def is_text(file: Path, function: Definition, name: str) -> bool:
    """Whether a caller gives a text for a parameter."""
    if (function, name) not in TEXT:
        TEXT[function, name] = False  # for a function that calls itself
        for other, caller, call in callers(file, function):
            found = given(Frame(file, function, call, Frame(other, caller)), name)
            if found is not None and found[1].function is caller:
                TEXT[function, name] |= bool(carried(*found)) or texts(*found) != [HOLE]
    return TEXT[function, name]


TEXT: dict[tuple[Definition, str], bool] = {}
"""(function, parameter) -> what `is_text` has found."""


def frames(
    file: Path, function: Definition, nodes: Sequence[ast.expr], inner: Sequence[Definition] = ()
) -> list[Frame]:
    """The function with each of the calls that give the texts in expressions of it."""
    names = {name for node in nodes for name in carried(node, Frame(file, function))}
    found = []
    for other, caller, call in callers(file, function) if names else ():
        here = Frame(file, function, call, Frame(other, caller))
        values = [value for name in names if (value := given(here, name)) is not None]
        if values and caller not in (function, *inner):
            above = frames(other, caller, [x for x, at in values if at is not here], (function, *inner))
            found += [Frame(file, function, call, frame) for frame in above]
    return found or [Frame(file, function)]


@cache
def errors() -> list[str]:
    """`Error`, and the classes that are made from it."""
    found = [re.findall(r"^class (\w+)\(Error\):", file.read_text(), re.MULTILINE) for file in files()]
    return ["Error", *itertools.chain.from_iterable(found)]


@cache
def messages() -> list[Message]:
    """All messages, those that users meet first in front, but for ELSEWHERE."""
    found = []
    for file, function, call in itertools.chain.from_iterable(every_call().get(name, []) for name in errors()):
        nodes = [*call.args[:1], *(x.value for x in call.keywords if x.arg in (None, "fix"))]
        for frame in frames(file, function, nodes):
            for text in texts(call.args[0], frame) if call.args else ():
                name = f"{file.relative_to(ROOT)}:{function.name}"
                found.append(Message(name, call.lineno, open_at(text), tuple(dict.fromkeys(ways(call, frame)))))
    for name, at in FACTS.items():
        for file, function, call in every_call().get(name, []):
            told = [text for arg in call.args[at : at + 2] for text in texts(arg, Frame(file, function))]
            if len(told) == 2:
                alone = any(keyword.arg == "wording" for keyword in call.keywords)
                problem = told[0] if alone else f"{HOLE} {told[0]} than rank 0"
                found.append(
                    Message(f"{file.relative_to(ROOT)}:{function.name}", call.lineno, open_at(problem), (told[1],))
                )
    return sorted((one for one in found if one.text not in ELSEWHERE), key=place)


def open_at(text: str) -> str:
    """A text with one HOLE for several that stand side by side: an exception's class and its message, say."""
    return re.sub(rf"(?<=: ){HOLE}: {HOLE}|{HOLE}( ?(->)?{HOLE})+", HOLE, text)


def place(message: Message) -> tuple[int, int, int]:
    """Where a message is on the page: its section, the module in it, and the line."""
    fits = [
        (len(path), -at, -i)
        for at, paths in enumerate(SECTIONS.values())
        for i, path in enumerate(paths)
        if message.module == path or message.module.startswith((f"{path}/", f"{path}:"))
    ]
    if not fits:
        raise ValueError(f"{message.module}:{message.line}: no section has this module")
    _, at, i = max(fits)
    return -at, -i, message.line


# ---- the page


def rows(section: int) -> list[Message]:
    """The messages of a section, each once: those that differ in what is filled in are one."""
    above = {(one.text, one.ways) for one in messages() if place(one)[0] < section}
    before, found = 0, [one for one in messages() if place(one)[0] == section and (one.text, one.ways) not in above]
    while len(found) != before:
        before, again, found = len(found), found, []
        for message in again:
            pairs = ((i, together(other, message)) for i, other in enumerate(found))
            at, one = next(((i, one) for i, one in pairs if one is not None), (len(found), message))
            found[at : at + 1] = [one]
    return found


def together(one: Message, other: Message) -> Message | None:
    """A message for two that say the same: one is the other with something filled in, or an Error has both; or None."""
    for a, b in ((one, other), (other, one)):
        if tells(a.text) and fits(a.text, b.text) and len(a.ways) == len(b.ways) and all(map(fits, a.ways, b.ways)):
            return a
    if one.text == other.text:
        return replace(one, ways=tuple(dict.fromkeys((*one.ways, *other.ways))))
    text = in_one(one.text, other.text)
    of_one_error = (one.module, one.line, one.ways) == (other.module, other.line, other.ways)
    return replace(one, text=text) if of_one_error and tells(text) else None


def tells(text: str) -> bool:
    """Whether a message can be told from others."""
    return sum(map(str.isalpha, text)) >= TELLING


def fits(general: str, text: str) -> bool:
    """Whether a text is another one with something filled in."""
    return re.fullmatch(".+".join(map(re.escape, general.split(HOLE))), text, re.DOTALL) is not None


def in_one(one: str, other: str) -> str:
    """Two texts as one, with a HOLE where their words differ."""
    a, b = re.findall(r"\w+|\W", one), re.findall(r"\w+|\W", other)
    front = alike(a, b)
    back = alike(a[front:][::-1], b[front:][::-1])
    return open_at("".join([*a[:front], HOLE, *a[len(a) - back :]]))


def alike(one: Sequence[str], other: Sequence[str]) -> int:
    """With how many equal words two texts begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def advice(ways: Sequence[str]) -> str:
    """What to write instead, in one line."""
    found: list[str] = []
    for way in (way.rstrip(",") for way in ways):
        one = in_one(found[-1], way) if found else ""
        if found and len(one.split()) == len(way.split()) == len(found[-1].split()):
            found[-1] = one
        else:
            found.append(way)
    return "; or ".join(found)


def shown(text: str) -> str:
    """A text as markdown shows it: what is not between backticks is no markup."""
    parts = re.sub(rf"{HOLE}(?=\.)|(?<=\.){HOLE}", "<...>", text).replace(HOLE, "...").split("`")
    if len(parts) % 2 == 0:
        raise ValueError(f"an odd number of backticks: {text}")
    parts[::2] = [
        MARKUP.sub(lambda found: re.sub(".", r"\\\g<0>", found[0]), part).replace("<", "&lt;") for part in parts[::2]
    ]
    return "`".join(parts)


def page() -> str:
    """The page as text."""
    parts = [INTRODUCTION.strip()]
    for i, heading in enumerate(SECTIONS):
        lines = [f"{shown(one.text)} | {shown(advice(one.ways))}" for one in rows(i) if not ARGUMENT.match(one.text)]
        if heading != OWN:
            parts += [f"## {heading}", "\n".join(["error | try", "---|---", *lines])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
