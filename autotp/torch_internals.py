"""torch_internals: every name of torch or Python that autotp replaces, and every private name of torch that it uses.

A new release of torch may rename any of them. All code that replaces a name takes it from `REPLACED`, and
tests/test_torch_internals.py fails for a replacement or a private name that a table here lacks.

NOTE [Losses that nobody would see]
A name that is gone is an Error when it is replaced. It is worse if torch keeps the name, and no longer looks it up
there: our function would never run, and nothing would say so. So a row names the functions of torch that must call it.
Before the first replacement their compiled code is searched for the name, which takes microseconds.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, Literal

import torch

from autotp.errors import Error

During = Literal["capture", "model", "group", "command", "process"]
"""When a name is replaced: while a model is captured, while a parallel model exists, while a process group is made,
while a command runs, or from then on."""


@dataclass(frozen=True)
class Replaced:
    """A name that autotp replaces.

    Attributes:
        owner: the module or the class that has the name, such as "torch.nn:Module".
        name: the name.
        during: when it is replaced.
        why: what our own function does.
        callers: functions of torch that must look the name up in its owner; none if users or Python itself do so.
        silent: what would be wrong without any error, if these functions did not call ours.
    """

    owner: str
    name: str
    during: During
    why: str
    callers: Sequence[str] = ()
    silent: str = ""

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def untried(self, problem: str) -> Error:
        """Returns the error that says that autotp was not tried with this version of torch."""
        return Error(
            f"torch {torch.__version__} {problem}, on which autotp relies: {self.why}",
            fix="a version of torch that autotp was tried with (docs/versions.md)",
            **({"otherwise": self.silent} if self.silent else {}),
        )

    def resolved_owner(self) -> Any:
        return resolve_name(self.owner)

    def original(self) -> Any:
        """Returns the present value of the name, after a look at its callers.

        Raises:
            Error: this version of torch has no such name, or does not call it where it did.
        """
        _expect_called(self)
        return getattr(self.resolved_owner(), self.name)

    def put(self, value: Any) -> Callable[[], None]:
        """Replaces the name, and returns the function that undoes it; raises Error as `original` does."""
        _expect_called(self)
        return set_until_undone(self.resolved_owner(), self.name, value)

    @contextmanager
    def replaced_by(self, value: Any) -> Iterator[None]:
        """A region in which the name stands for `value`."""
        undo = self.put(value)
        try:
            yield
        finally:
            undo()


def set_until_undone(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of a module, a class or a function, and returns the function that undoes it.

    A class gets it by `type.__setattr__`: a metaclass of autotp forwards plain assignments (`runtime/module.py`).
    """
    set_name, delete = (type.__setattr__, type.__delattr__) if isinstance(owner, type) else (setattr, delattr)
    had, before = name in vars(owner), vars(owner).get(name)
    if isinstance(owner, types.FunctionType):  # Its code is in none of its own attributes.
        had, before = True, getattr(owner, name)
    set_name(owner, name, value)
    return (lambda: set_name(owner, name, before)) if had else (lambda: delete(owner, name))


@cache
def _expect_called(row: Replaced) -> None:
    """Raises Error if torch has not the name of a row, or does not look it up where it did."""
    owner = _resolved(row.owner, row)
    if not hasattr(owner, row.name) and row.name not in ADDED:
        raise row.untried(f"has no `{row}`")
    for caller in row.callers:
        function = _resolved(caller, row)
        if not looks_up(function, owner, row.name):
            raise row.untried(f"does not call `{row}` in `{caller.replace(':', '.')}`")


def _resolved(path: str, row: Replaced) -> Any:
    try:
        return resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise row.untried(f"has no `{path.replace(':', '.')}`") from error


def looks_up(function: Any, owner: Any, name: str) -> bool:
    """True if a function looks up a name: as a global of its module, if this is the owner, or as an attribute."""
    function = getattr(function, "__func__", function)
    # Decorators such as `torch.no_grad()` keep the function itself there.
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    is_global = isinstance(owner, types.ModuleType) and name in function.__globals__
    return name in _names_of(code) and (not is_global or function.__globals__ is vars(owner))


def _names_of(code: types.CodeType) -> set[str]:
    """Returns the names that a code and the functions inside it look up."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {*code.co_names, *code.co_freevars}.union(*map(_names_of, inner))


MODULE, TENSOR_SIZES = "torch.nn:Module", "torch.fx.experimental.symbolic_shapes"

# ---- while a model is captured: what anything but an operator does must be observed while the model runs

READS_ATTRIBUTE = Replaced(MODULE, "__getattribute__", "capture", "notes which attributes of modules forward reads")
SETS_ATTRIBUTE = Replaced(MODULE, "__setattr__", "capture", "notes which blocks set attributes of modules")
DELETES_ATTRIBUTE = Replaced(MODULE, "__delattr__", "capture", "notes which blocks delete attributes of modules")
CONVERTS_MODULE = Replaced(
    MODULE, "_apply", "capture", "a conversion of a module in forward changes nothing, or is refused",
    callers=("torch.nn:Module.to", "torch.nn:Module.float", "torch.nn:Module.half", "torch.nn:Module.bfloat16"),
    silent="the first call would change the model for later ones",
)  # fmt: skip
ZERO_GRAD = Replaced(MODULE, "zero_grad", "capture", "refuses it in forward")
READS_FUNCTION = Replaced(
    "torch.autograd.function:FunctionMeta", "__getattribute__", "capture",
    "puts the backward of a torch.autograd.Function into the graph",
    silent="the model's own backward would be replaced by that of its operators",
)  # fmt: skip
APPLIES_IN_FUNC = Replaced(
    "torch.autograd.function", "custom_function_call", "capture", "the same under transforms of torch.func",
    callers=(
        "torch.autograd.function:_call_custom_function_call"  # torch 2.14
        if hasattr(torch.autograd.function, "_call_custom_function_call")
        else "torch.autograd.function:Function.apply",
    ),
    silent="the model's own backward would be replaced by that of its operators",
)  # fmt: skip
IS_EXPORTING = Replaced(
    "torch.compiler", "is_exporting", "capture", "a torch.autograd.Function stays in the graph operator by operator",
    callers=("torch._export.wrappers:allow_in_pre_dispatch_graph",),
    silent="a torch.autograd.Function would be one node, whose backward no rank can cut",
)  # fmt: skip
BEGINS_DERIVATIVE = (
    Replaced(
        "torch._functorch.eager_transforms", "grad_increment_nesting", "capture", "refuses torch.func.grad in forward",
        callers=("torch._functorch.eager_transforms:grad_and_value_impl",),
        silent="a derivative that forward takes would be a constant",
    ),
    Replaced(
        "torch._functorch.eager_transforms", "jvp_increment_nesting", "capture", "refuses torch.func.jvp in forward",
        callers=("torch._functorch.eager_transforms:_jvp_with_argnums",),
        silent="a derivative that forward takes would be a constant",
    ),
    Replaced(
        "torch.autograd.forward_ad", "enter_dual_level", "capture", "refuses dual numbers in forward",
        callers=("torch.autograd.forward_ad:dual_level.__enter__",),
        silent="a derivative that forward takes would be a constant",
    ),
)  # fmt: skip
GRADIENT_MODES = tuple(
    Replaced("torch", name, "capture", "answers for the call that is captured, and not for the exporter")
    for name in ("is_grad_enabled", "is_inference_mode_enabled")
)
GENERATOR = Replaced(
    "torch.random", "default_generator", "capture", "forward may not set torch's random state",
    callers=("torch.random:set_rng_state", "torch.random:seed"), silent="later calls would not set the state",
)  # fmt: skip
COLLECTIVES_OF_USERS = tuple(
    Replaced("torch.distributed", name, "capture", "a collective of forward is an operator of the graph, or refused")
    for name in (
        "reduce", "gather", "scatter", "reduce_scatter", "all_to_all", "send", "recv", "isend", "irecv",
        "batch_isend_irecv", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
        "monitored_barrier", "all_reduce", "broadcast", "barrier",
    )
)  # fmt: skip
CAUSAL_MASK = Replaced(
    "torch.nn.modules.transformer", "_detect_is_causal_mask", "capture", "does not look at the numbers of a mask",
    callers=("torch.nn.modules.transformer:TransformerEncoder.forward",),
)  # fmt: skip
ENCODER_FORWARD = Replaced("torch.nn:TransformerEncoder", "forward", "capture", "warns of padding in evaluation")
IS_INSTANCE = Replaced("builtins", "isinstance", "capture", "the model's code sees a number where there is a symbol")
COMPARES_NUMBERS = tuple(
    Replaced(f"torch:{number}", name, "capture", "the model's code gets a bool of a comparison of sizes")
    for number in ("SymInt", "SymFloat")
    for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
)
COMPUTES_FLOATS = tuple(
    Replaced("torch:SymFloat", name, "capture", "what algebra knows of a number, and arithmetic does not, is a read")
    for name in (
        "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__radd__", "__sub__", "__rsub__",
        "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__floordiv__", "__rfloordiv__",
        "__mod__",
    )
)  # fmt: skip
TRUTH_OF_NUMBERS = tuple(
    Replaced(f"torch:{number}", "__bool__", "capture", "a branch on numbers that forward reads is a read")
    for number in ("SymBool", "SymInt", "SymFloat")
)
NUMBERS_IN_NUMPY = tuple(
    Replaced(f"torch:{number}", "__array_ufunc__", "capture", "numpy gets the number that forward reads")
    for number in ("SymInt", "SymFloat")
)
ADDED = {"__array_ufunc__"}
"""Names that autotp adds to a class that has none."""
SIZES_AS_TEXT = tuple(
    Replaced("torch:SymInt", name, "capture", "a size that is used as text or as a key becomes a number")
    for name in ("__hash__", "__str__", "__repr__", "__format__")
)
EVALUATES_SIZES = Replaced(
    f"{TENSOR_SIZES}:ShapeEnv", "evaluate_expr", "capture", "a question of too many terms ends the capture",
    callers=(f"{TENSOR_SIZES}:ShapeEnv.evaluate_sym_node",), silent="a capture would take minutes",
)  # fmt: skip
FILES_OF_GUARDS = Replaced(
    TENSOR_SIZES, "uninteresting_files", "capture", "a line of an error about sizes is one of the model",
    callers=(f"{TENSOR_SIZES}:ShapeEnv._get_user_frame",), silent="errors would name lines of autotp",
)  # fmt: skip
NOT_KNOWN = tuple(
    Replaced(owner, "__init__", "capture", "notes an exception of the exporter, which the model may not catch")
    for owner in (
        f"{TENSOR_SIZES}:GuardOnDataDependentSymNode",
        "torch._subclasses.fake_tensor:DataDependentOutputException",
    )
)
STACK_OF_NODE = Replaced(
    "torch.fx.proxy", "CapturedTraceback", "capture", "looks up the model's frames only, and not a hundred",
    callers=("torch.fx.proxy:TracerBase.create_node",), silent="a capture would take twice the time",
)  # fmt: skip
METADATA_OF_NODE = Replaced(
    "torch.fx.experimental.proxy_tensor", "_extract_tensor_metadata", "capture",
    "leaves out a second description of each value, which nothing reads",
    callers=("torch.fx.experimental.proxy_tensor:set_meta",), silent="a capture would take longer",
)  # fmt: skip
BATCHED_ROWS = Replaced(
    "torch._functorch.vmap", "_add_batch_dim", "capture", "notes of the rows of torch.vmap whose rows they are",
    callers=("torch._functorch.vmap:_create_batched_inputs",), silent="an operand that comes back would be a copy",
)  # fmt: skip
ROWS_OF_BATCH = Replaced(
    "torch._functorch.vmap", "_remove_batch_dim", "capture", "records what moves the dimension of `out_dims`",
    callers=("torch._functorch.vmap:_maybe_remove_batch_dim",),
    silent="outputs of torch.vmap would have their dimensions in another order",
)  # fmt: skip

FLEX_ATTENTION_CODE = Replaced(
    "torch.nn.attention.flex_attention:flex_attention", "__code__", "capture", "records one operator for each call"
)
BLOCK_MASK_CODE = Replaced(
    "torch.nn.attention.flex_attention:create_block_mask", "__code__", "capture",
    "makes no tensor of queries x keys: a graph needs the mask's function alone",
)  # fmt: skip

# ---- while a parallel model exists: a rank must count over all ranks, and its failures must be known to the others

TOTAL_NORM = Replaced(
    "torch.nn.utils.clip_grad", "_get_total_norm", "model", "the norm of all gradients is that over all ranks",
    callers=("torch.nn.utils.clip_grad:clip_grad_norm_",), silent="each rank would clip by the norm of its own parts",
)  # fmt: skip
UNSCALES = Replaced(
    "torch.amp:GradScaler", "_unscale_grads_", "model", "an overflow on one rank is one on all ranks",
    callers=("torch.amp:GradScaler.unscale_", "torch.amp:GradScaler._check_inf_per_device"),
    silent="some ranks would step, and others would not",
)  # fmt: skip
RUNS_BACKWARD = Replaced(
    "torch.autograd", "_engine_run_backward", "model", "notes an exception that leaves a backward on this rank",
    callers=("torch.autograd:backward", "torch.autograd:grad"),
    silent="collectives after a caught exception would pair with others of the other ranks",
)  # fmt: skip
WRAPS_FOR_GRAD = Replaced(
    "torch._functorch.eager_transforms", "_wrap_tensor_for_grad", "model", "torch.func gets whole parameters",
    callers=("torch._functorch.eager_transforms:_wrap_all_tensors",),
    silent="torch.func would differentiate by this rank's part",
)  # fmt: skip
BATCHES_INPUTS = tuple(
    Replaced(
        owner, "_process_batched_inputs", "model", "torch.vmap gets whole parameters",
        callers=(f"{owner}:{caller}",), silent="torch.vmap would take this rank's part",
    )
    for owner, caller in (("torch._functorch.vmap", "vmap_impl"), ("torch._functorch.apis", "chunk_vmap"))
)  # fmt: skip
_GROUP, _OF_GROUPS = "torch._C._distributed_c10d:ProcessGroup", "torch.distributed.distributed_c10d"
OF_SOME_RANKS = tuple(
    Replaced(
        _GROUP, name, "model", "what some ranks start alone is not counted among what all ranks start",
        callers=(f"{_OF_GROUPS}:{caller}",), silent="ranks that are at the same place would seem to be apart",
    )
    for name, caller in (
        ("send", "isend"), ("recv", "irecv"), ("recv_anysource", "irecv"), ("monitored_barrier", "monitored_barrier"),
    )
)  # fmt: skip

# ---- for a moment, or for good

NAMES_GROUP = Replaced(
    _OF_GROUPS, "_hash_ranks_to_str", "group", "names a new group by what all its ranks know",
    callers=(f"{_OF_GROUPS}:_process_group_name",), silent="the ranks of a group would wait for each other",
)  # fmt: skip
EXCEPT_HOOK = Replaced("sys", "excepthook", "process", "prints an error that ends the program as the last line")

SHOW_WARNING = Replaced("warnings", "showwarning", "command", "the command line prints warnings as its own lines")

REPLACED: tuple[Replaced, ...] = tuple(
    row
    for value in list(globals().values())
    for row in (value if isinstance(value, tuple) else (value,))
    if isinstance(row, Replaced)
)
"""All rows."""


# ---- private names that autotp uses, and does not replace


@dataclass(frozen=True)
class Used:
    """Private names of one owner. If one is gone, an ImportError or an AttributeError says so.

    Attributes:
        owner: the module or the class that has them; "object of CLASS" where only its objects have them.
        names: the names, with spaces between them.
        why: what autotp does with them.
    """

    owner: str
    names: str
    why: str


OF_OBJECTS = "object of "
USED = (
    # Fake tensors and graphs: capture and passes compute shapes and dtypes as torch.export does.
    Used("torch", "_subclasses", "FakeTensor and its mode: what torch.export puts into a graph's metadata"),
    Used("torch", "_guards", "finds the fake mode of a graph"),
    Used("torch", "_export", "the regions in which torch.export runs a model; min and max of symbols"),
    Used("torch", "_ops", "the classes of operators, to tell them from other functions"),
    Used("torch", "_dynamo", "`allow_in_graph` of functions that are not imported with torch; sources of symbols"),
    Used("torch.fx", "_lazy_graph_module", "the exporter writes no Python code for graphs that do not run"),
    Used("torch.utils", "_pytree", "containers of arguments as torch.export flattens them"),
    Used("torch.utils", "_sympy", "the functions, values and texts of expressions of sizes"),
    Used("object of torch:SymInt", "_expr", "the expression of a size"),
    Used("object of torch._ops:OpOverload", "_schema _overloadname", "which arguments an operator has and writes"),
    Used("torch.ops", "_c10d_functional", "collectives that torch.compile and tensor cores overlap"),
    # Transforms and modes: an operator of autotp must know what is around it.
    Used("torch", "_functorch", "torch.vmap in a graph; a region outside of transforms of torch.func"),
    Used("torch._C", "_functorch _are_functorch_transforms_active", "whether a transform of torch.func is around"),
    Used(
        "torch._C",
        "_vmapmode_increment_nesting _vmapmode_decrement_nesting",
        "rows of torch.vmap on which a collective runs at once",
    ),
    Used("torch", "_add_batch_dim _remove_batch_dim", "the same"),
    Used(
        "torch._C",
        "_len_torch_dispatch_stack _len_torch_function_stack _get_dispatch_mode _get_function_stack_at "
        "_TorchDispatchModeKey _DisableTorchDispatch _EnableTorchFunction _disabled_torch_function_impl",
        "which modes are active: without any, an operator takes the short way",
    ),
    Used("torch.utils", "_python_dispatch _device", "the classes of modes, and a region without them"),
    Used("torch.overrides", "_get_current_function_mode_stack", "the functions that a mode has replaced"),
    Used("torch.Tensor", "_make_wrapper_subclass", "tensors with the shape of the whole"),
    Used("torch.amp.autocast_mode", "_enter_autocast _exit_autocast", "autocast regions as nodes of a graph"),
    Used("torch.autograd.forward_ad", "_current_level", "whether a dual level is open"),
    # Autograd: the order of backward, and what it keeps.
    Used("torch", "_C", "the functions of this table that are in torch's C++"),
    Used("torch._C", "_autograd _functions", "hooks on saved tensors; the classes of nodes"),
    Used("torch._C", "_dispatch_has_kernel_for_dispatch_key", "which operators autocast has its own version of"),
    Used("torch._C", "_current_graph_task_id", "tells one backward from another"),
    Used(
        "torch._C._autograd",
        "_get_current_graph_task_keep_graph _top_saved_tensors_default_hooks _push_saved_tensors_default_hooks "
        "_pop_saved_tensors_default_hooks",
        "whether backward keeps the graph; hooks on saved tensors without a Python frame for each",
    ),
    Used("torch.autograd", "_get_sequence_nr", "the order in which backward runs nodes"),
    Used("torch.autograd", "Variable._execution_engine", "calls a function at the end of a backward"),
    Used("torch.autograd.profiler", "_is_profiler_enabled", "names modules for the profiler only if one runs"),
    Used("object of torch.autograd:Function", "_backward_cls _forward_cls", "finds autotp's nodes in a graph"),
    Used("object of torch.autograd.graph:Node", "_set_sequence_nr _sequence_nr", "sets that order"),
    Used("object of torch:Tensor", "_version _is_view _base", "whether memory was written, or is another's"),
    Used(
        "object of torch:Tensor",
        "_cdata _values _indices _backward_hooks",
        "which memory; sparse parts; hooks",
    ),
    # Modules and optimizers.
    Used(
        "object of torch.nn:Module",
        "_parameters _buffers _modules _backward_hooks _backward_pre_hooks _forward_pre_hooks "
        "_load_state_dict_pre_hooks _register_load_state_dict_pre_hook _save_to_state_dict _load_from_state_dict "
        "_metadata",
        "tables that `named_parameters` and others leave entries out of; hooks that a graph would not run",
    ),
    Used(
        "torch.nn.modules.module",
        "_global_forward_hooks _global_forward_pre_hooks _global_backward_hooks _global_backward_pre_hooks",
        "hooks on all modules, which would not run for parts of a model",
    ),
    Used("torch.nn.modules.batchnorm", "_NormBase", "all norms with running statistics"),
    Used("torch.nn.modules.conv", "_ConvNd", "all convolutions"),
    Used("torch.nn.modules.dropout", "_DropoutNd", "all dropouts"),
    Used("torch", "_has_compatible_shallow_copy_type", "whether `.data` of a parameter can be set"),
    Used("torch", "_foreach_mul_ _foreach_norm", "one kernel for the gradients of all parameters"),
    Used("torch", "_assert_async", "an assertion for which a GPU is not waited for"),
    Used("torch", "_check", "tells the exporter a fact about a size"),
    Used("torch._C", "_nn", "scaled_dot_product_attention as the operator that it is"),
    Used("torch.nn.attention.bias.CausalBias", "_dispatch", "kernels for a causal mask of some of the queries"),
    Used("torch.optim.optimizer", "_foreach_supported_types", "parts of parameters take the foreach and fused ways"),
    Used("torch.utils._foreach_utils", "_foreach_supported_types", "gradients of parts do"),
    Used(
        "object of torch.optim:Optimizer",
        "_optimizer_step_pre_hooks _optimizer_step_post_hooks",
        "our hooks are next to the step: the user's run outside of them",
    ),
    # Process groups.
    Used("torch._C", "_distributed_c10d", "the class of groups, by their names, and one that only counts"),
    Used(
        "torch.distributed.distributed_c10d",
        "_get_default_store _set_pg_timeout _world",
        "the store of a process; timeouts; all groups of a process",
    ),
    Used(
        "object of torch.distributed:ProcessGroup",
        "_get_backend _device_types _get_sequence_number_for_group _allgather_base _reduce_scatter_base "
        "_register_backend _set_default_backend _timeout",
        "one gather of a flat tensor; how many collectives a rank has started; timeouts; gloo inside another backend",
    ),
    Used("torch.distributed", "_functional_collectives", "the operator for each collective of user code"),
    Used("torch.distributed", "_symmetric_memory", "products that overlap with their gathers on GPUs"),
    Used("torch.distributed.pipelining", "_backward", "one stage's backward"),
    Used("torch.distributed.pipelining.microbatch", "_Replicate", "arguments that all microbatches share"),
    Used("torch.nn.parallel.DistributedDataParallel", "_get_active_ddp_module", "which DDP a call is in"),
    Used(
        "object of torch.distributed.fsdp:FSDPModule",
        "_get_fsdp_state _fsdp_param_groups _mp_policy",
        "the ranks and the dtypes of fully_shard",
    ),
    # The compiler.
    Used("torch._C", "_dynamo", "Dynamo leaves the frames of collectives alone"),
    Used("object of a function", "_dynamo_marked_constant", "without the second that torch.compiler's imports take"),
    Used("torch", "_inductor", "passes over compiled graphs, and the names of modes"),
    # Python.
    Used("sys", "_getframe _current_frames", "who calls: user code is answered about the whole"),
    Used("os", "_exit", "ends a process whose threads hang in a collective"),
    Used("threading", "_DummyThread", "threads that Python did not start"),
    Used("functools", "_lru_cache_wrapper", "tells functions with a cache"),
    Used("object of abc:ABCMeta", "_abc_impl", "a class that takes the place of an abstract one"),
    Used("object of typing:NamedTuple", "_asdict _fields _make _replace", "public, despite their names"),
)
"""All private names that autotp uses and does not replace."""


# ---- modules and functions of torch, by which autotp tells who calls it

RIGHT_ON_PARTS = (
    "torch.optim", "torch.nn.modules.module", "torch.nn.parallel", "torch.nn.utils.clip_grad", "torch.distributed",
    "torch.amp", "torch.serialization", "torch.storage", "torch.multiprocessing", "torch.export",
    "torch.fx", "torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses",
)  # fmt: skip
"""Packages of torch that are right on parts, or are refused elsewhere. All others pass a call of user code on."""
NEED_WHOLES = ("torch.optim._muon", "torch.optim._adafactor", "torch.optim.lbfgs")
"""Modules of torch's optimizers that need wholes, whoever calls them."""
PASSES_ON = (
    "torch.optim.swa_utils", "torch._functorch.apis", "torch._functorch.eager_transforms",
    "torch._functorch.predispatch", "torch._functorch.vmap",
)  # fmt: skip
"""Modules of these packages that pass a call on."""
READ_THROUGH = ("torch.nn.modules.module.", "torch.distributed.checkpoint.", "torch.utils._contextlib.")
"""Modules that read a state dict for their caller."""
TO_FILL = (
    ("torch.distributed.checkpoint.state_dict", "_load_model_state_dict"),
    ("torch.distributed.checkpoint.state_dict", "_load_optim_state_dict"),
    ("safetensors.torch", "load_model"),
)
"""Functions that read a state dict to fill it: module, function."""
BETWEEN = ("torch.optim.", "torch._dynamo.", "torch._compile")
"""Modules between `state_dict()` of an optimizer and the code that calls it."""
CALLERS = (*RIGHT_ON_PARTS, *NEED_WHOLES, *PASSES_ON, *READ_THROUGH, *BETWEEN)
"""All these modules."""


@cache
def expect_callers() -> None:
    """Raises Error if this version of torch lacks one of `CALLERS`: its code would be taken for that of others."""
    for name in (module.rstrip(".") for module in CALLERS):
        parent = name.rpartition(".")[0]
        # `find_spec` imports the packages above: code of one that is not imported asks nothing.
        if parent in sys.modules and name not in sys.modules and find_spec(name) is None:
            raise Error(
                f"torch {torch.__version__} has no module `{name}`, by which autotp tells who reads a parameter",
                fix="a version of torch that autotp was tried with (docs/versions.md)",
                otherwise="this module's code would get whole tensors in place of parts, or the reverse",
            )


# ---- what torch says in exceptions: an unknown text makes a worse message, and the exception goes on

NO_NUMPY, NO_COMPLEX = ".numpy() is not supported", "item NYI"
"""Of a tensor without values; of a complex one."""
NEEDS_NUMBERS = ("expected to contain only concrete integers", "its data is not allocated yet")
"""Where it needs the numbers in a tensor, or those of a size that a tensor's values made."""
TAKES_FUNCTIONS = "torch._higher_order_ops."
"""Where the Functions of torch's operators that take functions are (cond, while_loop, scan)."""
OTHER_MODE = "doesn't match mode"
"""Of a tensor that is not among those of a capture."""
SETS_FLAGS = "you can only change requires_grad flags of leaf variables"
"""Where a model sets `requires_grad` of its input (Wav2Vec2), and the input has a gradient already."""
