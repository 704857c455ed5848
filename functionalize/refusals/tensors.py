"""Refusals of tensors and modules that no captured program can hold: by class, layout or origin."""

from __future__ import annotations

from functionalize.errors import UnsupportedProgramError
from functionalize.refusals.refusal import Refusal

_UNWRAP = "capture the inner module (`.module`), and wrap the code that calls the program"
_SHARDED = "its hooks gather and scatter the parameters with collectives that write in place"
_PROCESSES = "torch.distributed has to be initialized"

SUBCLASS = Refusal(
    UnsupportedProgramError,
    what="{tensor} is a {kind}, a subclass of torch.Tensor",
    why="a captured program computes with plain tensors, and the class does not say which tensors it holds",
    hint="give the class `__tensor_flatten__` and `__tensor_unflatten__`, pass plain tensors, or use torch.compile",
    example="""
class Tagged(torch.Tensor): ...
capture(lambda x: x + 1, (torch.ones(2).as_subclass(Tagged),))
""",
)
WRAPPER_OF_SYMBOLS = Refusal(
    UnsupportedProgramError,
    what="{tensor} is a {kind}, and has sizes that are symbols",
    why="a call makes such a tensor of the plain tensors that it holds, and of sizes that are numbers",
    hint="capture it with plain sizes, and with on_guard_failure='recapture' if these differ from call to call; in "
    "torch.compile, pass dynamic=False",
    no_example="a tracer that makes symbols has to run",
)
WRAPPER_WRITTEN_WITH_GRADIENT = Refusal(
    UnsupportedProgramError,
    what="{tensor} is a {kind}, and the program writes a value with a gradient to it",
    why="a call writes to the plain tensors inside it, which autograd does not see",
    hint="write under `torch.no_grad()`, or return the new value",
    example="""
from torch.testing._internal.two_tensor import TwoTensor
w = torch.ones(2, requires_grad=True)
capture(lambda x: x.mul_(w), (TwoTensor(torch.ones(2), torch.ones(2)),))
""",
)
WRAPPER_CHANGED = Refusal(
    UnsupportedProgramError,
    what="{tensor} is a {kind}, and the program changes its {part}",
    why="a call writes to the plain tensors inside it, and leaves all else as it is",
    hint="make a new tensor, and return it",
    example="""
from torch.testing._internal.two_tensor import TwoTensor
def f(x): x.a = x.a + 1
capture(f, (TwoTensor(torch.ones(2), torch.ones(2)),))
""",
)
WRAPPER_TWICE_DIFFERENTIATED = Refusal(
    RuntimeError,
    what="a derivative of a gradient of a captured program with a {kind}",
    why="its backward computes with the plain tensors inside it, which autograd does not see",
    hint="take the first gradient inside of the captured program",
    example="""
from torch.testing._internal.two_tensor import TwoTensor
x = TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_()
y = capture(lambda x: (x * x).sum(), (x,))(x)
torch.autograd.grad(y, x, create_graph=True)
""",
)
OTHER_TANGENT = Refusal(
    RuntimeError,
    what="a {kind} that a captured program returned gets a gradient of class {other}, or with other metadata",
    why="its backward was captured for a gradient like the result",
    hint="convert the gradient, or give the class `__coerce_same_metadata_as_tangent__`",
    no_example="a class whose gradients are unlike its tensors takes more than a few lines",
)
WRAPPER_EXPORTED = Refusal(
    UnsupportedProgramError,
    what="{tensor} is a {kind}",
    why="an exported program has only the plain tensors inside it, and this place has room for one tensor",
    hint="pass, return or keep the plain tensors inside it; gradients are left by the backward: export the forward",
    example="""
from torch.testing._internal.two_tensor import TwoTensor
w = torch.nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
capture(lambda x: (x * w).sum().backward(), (torch.ones(2),)).to_exported_program()
""",
)
SUBCLASS_MADE = Refusal(
    UnsupportedProgramError,
    what="the program makes a tensor of a subclass from a tensor that it computed",
    why="a captured program computes with plain tensors: what the class does at each operator would be lost",
    hint="compute with plain tensors, convert the results to the subclass outside, or use torch.compile",
    example="""
class Tagged(torch.Tensor): ...
capture(lambda x: Tagged(x + 1), (torch.ones(2),))
""",
)
UNSUPPORTED_LAYOUT = Refusal(
    UnsupportedProgramError,
    what="{tensor} is a {layout} tensor",
    why="a program is captured with fake tensors, which cannot have this layout",
    hint="pass padded or dense tensors",
    example="capture(lambda x: x + 1, (torch.ones(2).to_mkldnn(),))",
)
LAZY_PARAMETER = Refusal(
    UnsupportedProgramError,
    what="{tensor} has no size yet",
    why="a lazy module makes its parameters when it first runs",
    hint="run the module once before it is captured",
    example="capture(torch.nn.LazyLinear(3), (torch.ones(2),))",
)
DATA_PARALLEL_OPTION = Refusal(
    UnsupportedProgramError,
    what="a module of DistributedDataParallel is captured with {option}",
    why="its reducer keeps other records with this option, which a captured program does not update",
    hint="wrap the module without this option; with static_graph=True, capture after a first step, or the module alone",
    no_example=_PROCESSES,
)
SHARDED_MODULE = Refusal(
    UnsupportedProgramError,
    what="{module} is a {kind}",
    why=_SHARDED,
    hint=_UNWRAP,
    no_example=_PROCESSES,
)
FULLY_SHARDED_MODULE = Refusal(
    UnsupportedProgramError,
    what="a module of `fully_shard` {problem}",
    why="a captured program takes sharded parameters, or gathered ones, and knows of no other records",
    hint="call its `reshard()` first, or wrap it without this option",
    no_example=_PROCESSES,
)
LEFT_SHARDED = Refusal(
    UnsupportedProgramError,
    what="at the end of the program a module of `fully_shard` {problem}",
    why="a captured program leaves sharded parameters, or gathered ones, and no other records",
    hint="call its `reshard()` at the end of the program",
    no_example=_PROCESSES,
)
SCRIPT_MODULE = Refusal(
    UnsupportedProgramError,
    what="{module} is a {kind}",
    why="TorchScript keeps its parameters and runs its code in C++, where Python cannot replace them",
    hint="use the original module, without torch.jit",
    example="capture(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2)), (torch.ones(2),))",
)
REACHED_TWICE = Refusal(
    UnsupportedProgramError,
    what="{tensor} and a tensor that shares its memory, where the program writes to one of the two",
    why="a capture does not find the other where it is held, so neither would see what is written to the other",
    hint="hold it in an attribute of a module, in a list or a dict, or pass it as an argument",
    example="""
state, x = torch.zeros(4), torch.ones(2)
x.part = state[:2]
def f(x):
    state.add_(1)
    return x.part * 2
capture(f, (x,))
""",
)

UNKNOWN_FAKE = Refusal(
    UnsupportedProgramError,
    what="a tensor of size {size} and {dtype}, {used}, is a fake tensor of unknown origin",
    why="another thread computed it, or code that turns dispatch modes off, or an earlier capture",
    hint="compute it in the thread that runs the program, with dispatch modes on",
    example="""
from torch.utils._python_dispatch import _disable_current_modes
def f(x):
    with _disable_current_modes():
        return x + 1
capture(f, (torch.ones(2),))
""",
)
SPARSE_GRADIENT = Refusal(
    UnsupportedProgramError,
    what="gradients go through the {part} of a sparse tensor of size {size}",
    why="their number is data-dependent, and torch's formula for the gradient needs a plain integer",
    hint="compute with `to_dense()`, or under `torch.no_grad()`",
    example="""
def f(x): return x.to_sparse().values().sum()
capture(f, (torch.eye(2).requires_grad_(),))
""",
)
COMPRESSED_SPARSE_MADE = Refusal(
    UnsupportedProgramError,
    what="the program makes a compressed sparse tensor from its parts",
    why="torch cannot do that with fake tensors",
    hint="make it outside and pass it, or convert a tensor (`to_sparse_csr()`)",
    example="""
def f(x): return torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), x, (1, 1)) @ x
capture(f, (torch.ones(1),))
""",
)
