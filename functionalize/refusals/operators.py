"""Refusals of operators: those without a fake implementation, custom ones that write, those with bodies."""

from __future__ import annotations

from functionalize.errors import UnsupportedMutationError, UnsupportedProgramError
from functionalize.refusals.refusal import Refusal

_OUTSIDE = "call it outside the traced function, or compute the result out of place and copy_ it into the argument"
_PURE_BODY = "in a graph a body is a function of values, but this one changes memory that other code may read"

NO_FAKE = Refusal(
    UnsupportedProgramError,
    what="the operator {op} has no fake implementation",
    why="a program is traced with fake tensors, and the shapes and dtypes of the operator's results are unknown",
    hint="register one with torch.library.register_fake; if the operator is torch's, wrap it in a custom operator "
    "(torch.library.custom_op) that has one",
    example="""
sine = torch.library.custom_op("mine::sine", lambda x: x.sin(), mutates_args=(), schema="(Tensor x) -> Tensor")
capture(lambda x: sine(x), (torch.ones(2),))
""",
)
FAKE_READS_VALUES = Refusal(
    UnsupportedProgramError,
    what="the fake implementation of {op} reads the values of a tensor",
    why="fake tensors have no values",
    hint="for a data-dependent size, use a symbol: torch.library.get_ctx().new_dynamic_size()",
    example="""
head = torch.library.custom_op("mine::head", lambda x: x[:1] * 1, mutates_args=(), schema="(Tensor x) -> Tensor")
head.register_fake(lambda x: x.new_empty(int(x[0])))
capture(lambda x: head(x), (torch.ones(2),))
""",
)
FAKE_RAISES = Refusal(
    UnsupportedProgramError,
    what="the fake implementation of {op} raises {kind}: {error}",
    why="a program is traced with fake tensors, for which the fake implementation runs instead of the operator",
    hint="pass other arguments if eager raises as well; else correct the fake implementation (torch.library.opcheck "
    "tests it)",
    example="""
tail = torch.library.custom_op("mine::tail", lambda x: x[1:].clone(), mutates_args=(), schema="(Tensor x) -> Tensor")
tail.register_fake(lambda x: x.new_empty(x.size(7)))
capture(lambda x: tail(x), (torch.ones(2),))
""",
)
COLLECTIVE = Refusal(
    UnsupportedMutationError,
    what="the collective operation {op} cannot be part of a graph",
    why="{reason}",
    hint="call it outside the captured program, between two of them",
    no_example="torch.distributed has to be initialized",
)
OBJECT_SENT = Refusal(
    UnsupportedProgramError,
    what="the program sends Python objects to other processes, or gets some from them",
    why="a graph has tensors, and these objects are other ones in each call",
    hint="send tensors, or send the objects outside the captured program",
    no_example="torch.distributed has to be initialized",
)
GROUP_MADE = Refusal(
    UnsupportedProgramError,
    what="the program makes a group of processes, or a mesh of them",
    why="a graph communicates in the groups that exist when it is captured, and eager makes another one in each call",
    hint="make it before, and communicate in it",
    no_example="torch.distributed has to be initialized",
)
UNPAIRED = Refusal(
    UnsupportedMutationError,
    what="{op} writes {arguments}",
    why="{reason}",
    hint=_OUTSIDE,
    example="""
def f(x, mean, variance): return torch.ops.aten.batch_norm_update_stats(x, mean, variance, 0.1)
capture(f, (torch.ones(2, 2), torch.ones(2), torch.ones(2)))
""",
)
RETURNS_WRITTEN = Refusal(
    UnsupportedMutationError,
    what=UNPAIRED.what,
    why="it returns the tensor that it writes, which auto_functionalized supports only for ops with a tag",
    hint="return nothing from the op, or define it with the tag torch.Tag.inplace or torch.Tag.out",
    example="""
library = torch.library.Library("mine_returned", "DEF")
library.define("plus_(Tensor(a!) x) -> Tensor(a!)")
library.impl("plus_", lambda x: x.add_(1), "CompositeExplicitAutograd")
capture(lambda x: torch.ops.mine_returned.plus_(x), (torch.ones(2),))
""",
)
RETURNS_OTHER = Refusal(
    UnsupportedMutationError,
    what=UNPAIRED.what,
    why="auto_functionalized supports only ops that return tensors or nothing",
    hint="return a fixed number of tensors from the op",
    example="""
def halves(x): return list(x.mul_(2).clone().split(1))
op = torch.library.custom_op("mine::halves", halves, mutates_args=("x",), schema="(Tensor(a!) x) -> Tensor[]")
op.register_fake(lambda x: [torch.empty(1), torch.empty(1)])
capture(lambda x: op(x), (torch.ones(2),))
""",
)
CUSTOM_READS_WHAT_IT_WRITES = Refusal(
    UnsupportedMutationError,
    what="{op} writes `{argument}` and reads another argument with the same elements",
    why="auto_functionalized runs the op on a copy of the tensor that it writes, and the other argument would not "
    "change with it",
    hint="pass a `.clone()` of the argument that is read if the op reads before it writes, or name it in "
    "`mutates_args`",
    example="""
def double(x, out): out.copy_(x * 2)
schema = "(Tensor x, Tensor(a!) out) -> ()"
op = torch.library.custom_op("mine::double", double, mutates_args=("out",), schema=schema)
capture(lambda x: op(x[1:], x[:-1]), (torch.ones(3),))
""",
)
CUSTOM_WRITES_SHARED = Refusal(
    UnsupportedMutationError,
    what="{op} writes arguments that share elements",
    why="auto_functionalized passes them as views of one base of one dtype, and they have no such base",
    hint="call it outside the traced function, or pass it tensors that do not share a storage",
    example="""
def fill(x, y): x.zero_(), y.zero_()
op = torch.library.custom_op("mine::fill", fill, mutates_args=("x", "y"), schema="(Tensor(a!) x, Tensor(b!) y) -> ()")
capture(lambda x: op(x, x.view(torch.int32)), (torch.ones(3),))
""",
)

# Operators with bodies: torch.cond, while_loop, ...

BODY_READS_VERSION = Refusal(
    UnsupportedProgramError,
    what="a body of {op} reads the `_version` of an operand",
    why="in a graph a body is a function of values, which have no count of writes",
    hint="read it outside the body, and use the number inside",
    example="""
def f(x): return torch.cond(x.sum() > 0, lambda x: x * x._version, lambda x: x * 2, (x,))
make_fx(functionalize(f), tracing_mode="fake")(torch.ones(2))
""",
)
BODY_RESHAPES = Refusal(
    UnsupportedMutationError,
    what="a body of {op} changes the shape or the strides of an operand",
    why=_PURE_BODY,
    hint="return a new tensor; or call it outside the traced function",
    example="""
def f(x): return torch.ops.higher_order.cond(x.sum() > 3, lambda a: (a.t_() * 1,), lambda a: (a.t() * 1,), (x,))
capture(torch.no_grad()(f), (torch.ones(2, 2),))
""",
)
BODY_WRITES = Refusal(
    UnsupportedMutationError,
    what="a body of {op} writes to operand {position}",
    why=_PURE_BODY,
    hint="return the new value, and copy_ it after the call; or call it outside the traced function",
    example="""
from torch._higher_order_ops.while_loop import while_loop
def f(x): return while_loop(lambda z: x.add_(1).sum() < 30, lambda z: (z * 2,), (x * 1,))
make_fx(torch.no_grad()(functionalize(f)), tracing_mode="fake")(torch.ones(2))
""",
)
BODY_WRITES_SHARED = Refusal(
    UnsupportedMutationError,
    what="a body of {op} writes to operand {position}, which shares elements with operand {other}",
    why=_PURE_BODY,
    hint="pass one of the two, and make the other as a view inside the body; or call it outside the traced function",
    example="""
def f(x): return torch.cond(x.sum() > 3, lambda a, b: a.add_(1) + b[0], lambda a, b: b[0] + a, (x[0], x))
make_fx(torch.no_grad()(functionalize(f)), tracing_mode="fake")(torch.ones(3, 2))
""",
)
