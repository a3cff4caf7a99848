"""Writes docs/errors.md from the source: each error and warning of autotp, and what to write instead.

python docs/errors.py

The messages are the first arguments of `Error(...)`, of exceptions behind `raise` and of warnings, and `fix=` says what
to write. What an f-string fills in is HOLE. A name is followed to what is assigned to it, a parameter to what the
callers of the function give, a call to what the function returns. Only the introduction and OTHERS are written here.
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
WARNING, COMMAND = "warn", "WrongUse"
HOLE = "\0"
EXPECTED = "what the error lists behind `expected`"
AGAIN = "what the error says behind `try`"
"""Of an error that is raised again, with its own advice, and of advice that is put together from several texts."""
FIELD = re.compile(r"\{[^{}]*\}")
"""What `str.format` fills in."""
MARKUP = re.compile(r"[*{}|]|(?<!\w)_+|_+(?!\w)")
"""What markdown would take for its own."""
FACTS = {"Fact": 2, "text_fact": 3}
"""What makes a fact that ranks must have alike -> where its problem is among the arguments; `fix` is the next one."""
ELSEWHERE = (HOLE, f"{HOLE} than {HOLE}", f"{HOLE} than rank 0")
"""Messages of a function whose callers say all of it: another rank, or modules that run later."""
TELLING = 6
"""So many letters tell a message from others."""
OWN = "a report of it"
"""What the advice of an error has that is a mistake of autotp."""
QUOTED = "quoted"
"""The sort of messages that are a part of others."""
OTHERS = (
    "AssertionError", "AttributeError", "KeyError", "NotADirectoryError", "OSError", "RuntimeError", "TimeoutError",
    "TypeError", "ValueError", COMMAND,
)  # fmt: skip
"""Classes of exceptions that are no Error."""
INTRODUCTION = """
# Errors

Every error and warning of autotp is here, sorted by its first words. `...` stands for what differs, such as a name or a
number: so search the page for some words of your message that hold neither, also from its middle. `try` is what to
write instead, as the error says it. A message about one argument is its name and value, such as `outputs='all'`, and
`expected` lists the right ones.

Where autotp sees that it cannot compute the same as one device, it raises one `autotp.Error` on every rank, before
anything is changed. [Limits](limits.md) lists what it sees later, and what it cannot see: the rows marked S, for silent.

## Read the message

The first line is the call and the problem. `at` is the line of your model, `try` is what to write instead. The traceback
has your own lines and one of autotp. In a run of torchrun the first error is the last line on the screen.

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
  at       errors.py:14  while h.max() > 6:
  try      do all rounds, and mask with torch.where; or one operator: autotp.opaque (every rank runs the code whole), or torch.library.custom_op and autotp.rule
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
`autotp plan file.py:factory --tp 2`. If there is nothing to write instead, you have three ways:

- `autotp.opaque(model.part, like=...)` keeps a module or a function out of the graph: every rank runs it eagerly, with
  whole inputs and parameters. `like` says what shapes it returns, for code that does not run without values. The plan
  says what it costs. It may do anything inside, but set attributes or write into its arguments.
- An operator of your own (`torch.library.custom_op`) may do anything inside. `autotp.rule` says how it can be cut; an
  operator without a rule gets whole tensors.
- Take the part out of the model: compute it in the training loop, and pass the result as an argument.
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
        sort: "Error", WARNING, or the class of another exception.
    """

    module: str
    line: int
    text: str
    ways: tuple[str, ...]
    sort: str = "Error"


# ---- the source


@cache
def files() -> list[Path]:
    """The modules of autotp, without its models, which are ordinary models."""
    every = [file for folder in ("autotp", "passes") for file in sorted((ROOT / folder).rglob("*.py"))]
    return [
        file for file in every if file.relative_to(ROOT).parts[:2] not in (("autotp", "models"), ("autotp", "passes"))
    ]


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
def constants(file: Path) -> dict[str, ast.expr]:
    """Name -> the value that a module assigns to it."""
    found = [node for node in tree(file).body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    return {node.targets[0].id: node.value for node in found if isinstance(node.targets[0], ast.Name)}


def constant(file: Path, name: str) -> ast.expr | None:
    """The value of a constant of a module, or of the one that it imports it from."""
    if name in constants(file):
        return constants(file)[name]
    module = imported(file).get(name, "").removeprefix("autotp.").replace(".", "/")
    sources = [ROOT / folder / f"{module}.py" for folder in ("autotp", "")]
    return next((constants(source).get(name) for source in sources if source in files()), None)


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
    """The calls of a function: a private one's in its module, a method's by a name that is no other's."""
    found = [
        call for call in every_call().get(function.name, []) if not ast.unparse(call[2].func).startswith("warnings.")
    ]
    alone = len(functions()[function.name]) == 1
    outside = not function.name.startswith("_")
    return [
        call
        for call in found
        if call[0] == file
        or (outside and (imports(call[0], function.name, file) if isinstance(call[2].func, ast.Name) else alone))
    ]


def imports(file: Path, name: str, source: Path) -> bool:
    """Whether a module imports a name from another one."""
    module = ".".join(source.relative_to(ROOT).with_suffix("").parts).removeprefix("autotp.")
    return f"autotp.{module}" in imported(file).get(name, "")


@cache
def imported(file: Path) -> dict[str, str]:
    """Name -> the module from which a module imports it."""
    froms = [node for node in ast.walk(tree(file)) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in froms for alias in node.names}


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
        if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            return [FIELD.sub(HOLE, text) for text in texts(node.func.value, frame, seen)]
        if called(node) in (*errors(), "str") and node.args:
            return texts(node.args[0], frame, seen)
        return either([text for value, inner in returned(node, frame) for text in texts(value, inner, seen)]) or [HOLE]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.value, ast.Name):
        return entry(node.value, str(node.slice.value), frame) or [HOLE]
    if isinstance(node, ast.Name) and node.id not in seen:
        if values := assigned(frame.function, node.id, node.lineno):
            return [text for value in values for text in texts(value, frame, (*seen, node.id))]
        if node.id in parameters(frame.function):
            found = given(frame, node.id)
            return [HOLE] if found is None else [text or HOLE for text in texts(found[0], found[1], seen)]
        value = constant(frame.file, node.id)
        return [HOLE] if value is None else texts(value, frame, (*seen, node.id))
    return [HOLE]


def either(found: Sequence[str]) -> list[str]:
    """Texts without those that say nothing, if others say something."""
    return [text for text in dict.fromkeys(found) if text.replace(HOLE, "")] or [HOLE]


def returned(call: ast.Call, frame: Frame) -> list[tuple[ast.expr, Frame]]:
    """What a function of the source returns in a call."""
    name = called(call)
    found = [x for x in functions().get(name, []) if x[0] == frame.file] or functions().get(name, [])
    if len(found) > 2 or any(frame.above(function) for _, function in found):  # A method may have a default.
        return []
    inner = [Frame(*one, call, frame) for one in found]
    returns = [(node.value, at) for at in inner for node in ast.walk(at.function) if isinstance(node, ast.Return)]
    return [(value, at) for value, at in returns if value is not None]


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
        values = assigned(frame.function, node.id, node.lineno) or [constant(frame.file, node.id)]
        return [text for value in values for text in entry(value, key, frame)]
    if isinstance(node, ast.Subscript):
        return entry(node.value, key, frame)
    return []


def ways(call: ast.Call, frame: Frame) -> Iterator[str]:
    """What an Error says is to be written instead."""
    found = list(fact(call, "fix", frame))
    found = found or [EXPECTED if text == HOLE else text for text in fact(call, "expected", frame)]
    found = [open_at(text) for text in found if text != HOLE]
    if not found and any(
        x.arg == "fix" or (x.arg is None and isinstance(x.value, ast.Attribute)) for x in call.keywords
    ):
        found = [AGAIN]
    yield from found


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
    found = [re.findall(r"^class (\w+)\(Error\b.*\):", file.read_text(), re.MULTILINE) for file in files()]
    return ["Error", *itertools.chain.from_iterable(found)]


@cache
def messages() -> list[Message]:
    """All messages, by the first letters that are fixed, but for ELSEWHERE."""
    found = []
    for file, function, call in itertools.chain.from_iterable(every_call().values()):
        if not is_message(file, call):
            continue
        nodes = [*call.args[:1], *(x.value for x in call.keywords if x.arg in (None, "fix"))]
        sort = called(call) if called(call) not in errors() else "Error"
        sort = WARNING if sort.startswith(WARNING) else sort
        name = f"{file.relative_to(ROOT)}:{function.name}"
        for frame in frames(file, function, nodes):
            for text in texts(call.args[0], frame) if call.args else ():
                found.append(Message(name, call.lineno, open_at(text), tuple(dict.fromkeys(ways(call, frame))), sort))
    for name, at in FACTS.items():
        for file, function, call in every_call().get(name, []):
            told = [text for arg in call.args[at : at + 2] for text in texts(arg, Frame(file, function))]
            if len(told) == 2:
                alone = any(keyword.arg == "wording" for keyword in call.keywords)
                problem = told[0] if alone else f"{HOLE} {told[0]} than rank 0"
                module = f"{file.relative_to(ROOT)}:{function.name}"
                found.append(Message(module, call.lineno, open_at(problem), (told[1],)))
    return sorted((one for one in found if one.text not in ELSEWHERE), key=lambda one: first_words(one.text))


def is_message(file: Path, call: ast.Call) -> bool:
    """Whether a call makes an Error, or an exception that is raised at once, or warns."""
    if isinstance(call.func, ast.Attribute):
        return ast.unparse(call.func) in ("warnings.warn", "warnings.warn_explicit")
    return called(call) in errors() or (called(call) in OTHERS and id(call) in raised(file))


@cache
def raised(file: Path) -> set[int]:
    """The calls behind the `raise` of a module."""
    return {id(node.exc) for node in ast.walk(tree(file)) if isinstance(node, ast.Raise)}


def first_words(text: str) -> str:
    """By what a message is found: what is fixed, from the first letter on."""
    return re.sub(r"^[^a-z0-9]+", "", text.replace("`", "").replace(HOLE, "").casefold())


def open_at(text: str) -> str:
    """A text with one HOLE for several that stand side by side: an exception's class and its message, say."""
    return re.sub(rf"(?<=: ){HOLE}: {HOLE}|{HOLE}( ?(->)?{HOLE})+", HOLE, text)


# ---- the page


def rows(sort: str) -> list[Message]:
    """The messages of a sort, each once: those that differ in what is filled in are one."""
    before, found = 0, [one for one in messages() if sort_of(one) == sort]
    while len(found) != before:
        before, again, found = len(found), found, []
        for message in again:
            pairs = ((i, together(other, message)) for i, other in enumerate(found))
            at, one = next(((i, one) for i, one in pairs if one is not None), (len(found), message))
            found[at : at + 1] = [one]
    return sorted(found, key=lambda one: first_words(one.text))


def sort_of(message: Message) -> str:
    """Under which heading a message is: its class, but OWN for a mistake of autotp."""
    if any(OWN in way for way in message.ways) or message.sort == "AssertionError":
        return OWN
    return message.sort if message.sort in (WARNING, COMMAND, "Error") else QUOTED


def together(one: Message, other: Message) -> Message | None:
    """A message for two that say the same: one is the other with something filled in, or an Error has both; or None."""
    for a, b in ((one, other), (other, one)):
        if tells(a.text) and fits(a.text, b.text) and len(a.ways) == len(b.ways) and all(map(fits, a.ways, b.ways)):
            return a
    if one.text == other.text:
        return replace(one, ways=tuple(dict.fromkeys((*one.ways, *other.ways))))
    text = in_one(one.text, other.text)
    of_one_error = (one.module, one.line, one.ways) == (other.module, other.line, other.ways)
    # The first words stay: by them a reader finds the message.
    of_one_error &= not text.startswith(HOLE) or one.text[0] in f"{HOLE}`" or other.text[0] in f"{HOLE}`"
    return replace(one, text=text) if of_one_error and tells(text) and text.count("`") % 2 == 0 else None


def tells(text: str) -> bool:
    """Whether a message can be told from others."""
    return sum(map(str.isalpha, text)) >= TELLING


def fits(general: str, text: str) -> bool:
    """Whether a text is another one with something filled in."""
    if HOLE not in general:
        return general == text
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


HEADINGS = {
    "Error": ("Errors", ""),
    WARNING: ("Warnings", ""),
    COMMAND: ("Wrong use of the command line", "`autotp COMMAND --help` says what a command takes."),
    QUOTED: (
        "Reasons that messages quote",
        "The message that quotes one of these says what to do. Some are torch's own words, for what torch does not do.",
    ),
    OWN: (
        "Mistakes of autotp",
        """
A check has found a mistake of autotp before a graph runs: nothing wrong was computed. Until it is mended,
`without=("overlap",)` or another pass of [performance.md](performance.md) may go round it. Open an issue where you
cloned autotp from, with the smallest model that gives the message, what `autotp doctor` prints, and the error with
`AUTOTP_TRACEBACK=full` in the environment, which shows the lines of autotp.
""".strip(),
    ),
}
"""Sort of messages -> its heading and what is said below it, in the order of the page."""


def page() -> str:
    """The page as text."""
    parts = [INTRODUCTION.strip()]
    for sort, (heading, first) in HEADINGS.items():
        parts += [f"## {heading}", *([first] * bool(first))]
        if sort == "Error":
            lines = [f"{shown(one.text)} | {shown(advice(one.ways))}" for one in rows(sort)]
            parts.append("\n".join(["message | try", "---|---", *lines]))
        else:
            parts.append("\n".join(f"- {shown(one.text)}" for one in rows(sort)))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
