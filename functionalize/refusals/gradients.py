"""Refusals of gradients: writes that autograd cannot follow, backwards that a graph cannot hold, hooks."""

from __future__ import annotations

from dataclasses import replace

from functionalize.errors import (
    NoFormulaError,
    OverlappingInputsError,
    UnsupportedMutationError,
    UnsupportedProgramError,
)
from functionalize.refusals.refusal import Refusal

_PURE_BACKWARD = "the backward of a captured program is a graph without side effects"
_OTHER_NODES = "a capture computes gradients with fake tensors, which have other autograd nodes"
_OUT_OF_PLACE = "use the result of the out-of-place operator (squeeze, t, ...)"
_VIEW_AGAIN = "for fake tensors, autograd replays the view operators after the write"

# Inputs that are views

INPUT_IS_VIEW = Refusal(
    UnsupportedProgramError,
    what="the program depends on whether `{input}` is a view, by `_is_view`, `_base`, `detach_`, a write after a hook "
    "on its gradient, or, if it has views, by `requires_grad_` or `as_strided_`",
    why="it is a view, but its base is not an input, and the capture uses a tensor that is not a view",
    hint="use detach() instead of detach_(), pass a clone, or read the property before the program is called",
    example="capture(lambda x: x + int(x._is_view()), (torch.ones(2)[1:],))",
)
INPUT_IS_LEAF_VIEW = Refusal(
    UnsupportedProgramError,
    what="the program writes the memory of `{input}` while it has views of it, or makes views of it with grad mode off",
    why="it is a view whose requires_grad was set: eager replays it from its base, which is not an input and requires "
    "no gradients",
    hint="pass a clone that requires gradients: `x.detach().clone().requires_grad_()`",
    example="""
def f(x):
    part = x[:1]
    with torch.no_grad():
        x.mul_(2)
    return part * 3
capture(f, (torch.ones(4).view(2, 2).requires_grad_(),))
""",
)
INPUT_IS_SILENT_VIEW = Refusal(
    UnsupportedProgramError,
    what="the program sets requires_grad on a view of `{input}`, and writes their memory",
    why="it is itself a view, made with grad mode off, of a tensor that requires gradients and is not an input: eager "
    "replays it from there",
    hint="pass a clone, or set requires_grad on a clone of the view",
    no_example="it needs a view whose requires_grad is False although that of its base is True",
)
INPUT_FOLLOWS_VIEW = Refusal(
    UnsupportedProgramError,
    what="the program replaces the data of `{input}` by `.data =`, and writes in place to its old or new data",
    why="it is a view of a tensor that requires gradients: after the write, eager applies its new offset and strides "
    "to that tensor, so that other elements get its gradient",
    hint="return the new tensor instead, or assign to `.data` of a clone",
    example="""
def f(x):
    older, x.data = x.detach(), x.detach() + 1
    older.mul_(2)
    return x * 2
capture(f, ((torch.ones(4, requires_grad=True) * 1)[2:],))
""",
)
INPUT_HAS_HOOKS = Refusal(
    UnsupportedProgramError,
    what="the program computes gradients, and `{input}` has hooks on its gradient",
    why="it is an argument: each call passes another tensor with other hooks, which a graph cannot call",
    hint="remove the hooks and do their work in the program, or run the backward outside the captured program",
    example="""
x = torch.ones(2, requires_grad=True)
x.register_hook(lambda g: g * 2)
capture(lambda x: x.sum().backward(), (x,))
""",
)

# Hooks

HOOK_LEFT = Refusal(
    UnsupportedProgramError,
    what="the program registers a hook {place} and does not remove it",
    why="each call would have to register one more hook, but this one refers to objects of the capture",
    hint="register it once before the capture, or remove it inside the program (`handle.remove()`)",
    example="""
def f(x): return x.register_hook(torch.abs) and x * 2
capture(f, (torch.ones(2, requires_grad=True),))
""",
)
NODE_HOOKS = Refusal(
    UnsupportedProgramError,
    what="the program computes gradients, and the autograd node that accumulates the gradient of `{input}` has hooks",
    why=_OTHER_NODES,
    hint="register the hooks on the tensor (register_hook, register_post_accumulate_grad_hook)",
    example="""
w = torch.ones(2, requires_grad=True)
node = torch.autograd.graph.get_gradient_edge(w).node
node.register_hook(lambda *g: None)
capture(lambda x: (x * w).sum().backward(), (torch.ones(2),))
""",
)
HOOK_OF_NODES = Refusal(
    UnsupportedProgramError,
    what="the program computes gradients, and a hook on the gradient of `{input}` refers to autograd nodes",
    why=_OTHER_NODES,
    hint="register and remove the hook inside the program (`torch.autograd.graph.register_multi_grad_hook`), or "
    "register a hook on each tensor before",
    example="""
w, v = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
torch.autograd.graph.register_multi_grad_hook((w, v), lambda gradients: None)
capture(lambda x: (x * w * v).sum().backward(), (torch.ones(2),))
""",
)

# What a backward does

BACKWARD_CHANGES_OBJECT = Refusal(
    UnsupportedProgramError,
    what="the backward of the program changes {object} in Python code",
    why=_PURE_BACKWARD,
    hint="compute the gradients inside the captured program, or do not change objects in hooks and custom backwards",
    example="""
seen = []
class Noting(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(lambda ctx, g: (seen.append(1), g)[1])
capture(lambda x: Noting.apply(x), (torch.ones(2, requires_grad=True),), gradients="now")
""",
)
BACKWARD_WRITES = Refusal(
    UnsupportedMutationError,
    what="the backward writes to a tensor that existed before it",
    why=_PURE_BACKWARD,
    hint="return the new value from the backward, or compute the gradients inside the captured program",
    example="""
seen = torch.zeros(2)
class Noting(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(lambda ctx, g: (seen.add_(g), g)[1])
capture(lambda x: Noting.apply(x), (torch.ones(2, requires_grad=True),), gradients="now")
""",
)
REDUCED_OUTSIDE = Refusal(
    UnsupportedProgramError,
    what="gradients are taken of a program that runs a module of `fully_shard`, {problem}",
    why="outside of the program, a backward gives parameters their reduced gradients, and changes nothing else",
    hint="capture the whole training step, with its `backward()`",
    no_example="torch.distributed has to be initialized",
)
UNUSED_OUTSIDE = Refusal(
    UnsupportedProgramError,
    what="a program runs a module of DistributedDataParallel that finds unused parameters; the backward comes later",
    why="a call tells the module what it has used by the results of the program, but a bucket has no parameter that is "
    "used, or the results do not depend on all that are",
    hint="return the results of the module, or capture the whole training step, with its `backward()`",
    no_example="torch.distributed has to be initialized",
)
BACKWARD_ACTS = Refusal(
    UnsupportedMutationError,
    what="{op} in a backward: it returns nothing, so it is called for its side effects",
    why=_PURE_BACKWARD,
    hint="compute the gradients inside the captured program, or call the operator outside",
    example="""
note = torch.library.custom_op("mine::note", lambda x: None, mutates_args=(), schema="(Tensor x) -> ()")
note.register_fake(lambda x: None)
def f(x):
    y = x * 2
    y.register_hook(lambda g: note(g))
    return y.sin()
capture(f, (torch.ones(2, requires_grad=True),), gradients="now")
""",
)
GRADIENT_OF_ELSEWHERE = Refusal(
    UnsupportedMutationError,
    what="a gradient is a tensor that the backward did not compute",
    why="the graph would treat it as a constant",
    hint="compute the gradient in the backward, or return a copy (`.clone()`)",
    example="""
from torch.utils._python_dispatch import _disable_current_modes
class Ones(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(lambda ctx, g: _disable_current_modes()(torch.ones)(2))
capture(Ones.apply, (torch.ones(2, requires_grad=True),), gradients="now")
""",
)
BACKWARD_BEYOND_INPUTS = Refusal(
    UnsupportedProgramError,
    what="the program runs a backward into the operators that computed its inputs",
    why="a captured program begins with its inputs: the operators before them are not part of its graph",
    hint="call backward() outside the captured program, or pass leaves and compute the inputs from them inside",
    example="capture(lambda x: x.sum().backward(), (torch.ones(2, requires_grad=True) * 2,))",
)
SCAN_DIFFERENTIATED = Refusal(
    UnsupportedProgramError,
    what="the program computes gradients through an operator whose body torch compiles separately (scan)",
    why="torch traces the backward of that body with fake tensors of another mode",
    hint="call it under torch.no_grad() if its gradients are not needed; use a Python loop, torch.cond or while_loop; "
    "or use torch.compile(backend='functionalize') for the whole program",
    example="""
from torch._higher_order_ops.scan import scan
def f(x): return scan(lambda carry, row: (carry * x + row, row.clone()), torch.zeros(2), torch.ones(3, 2))[0]
capture(f, (torch.ones(2, requires_grad=True),))
""",
)
LOOP_RESULT_IN_BODY = Refusal(
    UnsupportedProgramError,
    what="the program passes a result of a while_loop to another operator with bodies",
    why="with grad mode on, the result is a view at a data-dependent offset, and torch reads the offset when it traces "
    "the bodies",
    hint="clone() the result; or run the loops under torch.no_grad() if their gradients are not needed",
    example="""
def f(x):
    (y,) = torch.while_loop(lambda z: z.sum() < 30, lambda z: (z * 2,), (x,))
    return torch.cond(y.sum() > 40, lambda y: y + 1, lambda y: y - 1, (y,))
capture(f, (torch.ones(2, requires_grad=True),))
""",
)
ONCE_DIFFERENTIABLE = Refusal(
    UnsupportedMutationError,
    what="a function that is marked with @once_differentiable is differentiated twice",
    why="the mark says that its backward cannot be differentiated",
    hint="remove the mark, or differentiate the function only once",
    example="""
from torch.autograd.function import once_differentiable
class Once(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(once_differentiable(lambda ctx, g: g * 2))
x = torch.ones(2, requires_grad=True)
result = capture(lambda x: Once.apply(x.sin()), (x,))(x).sum()
torch.autograd.grad(result, x, create_graph=True)[0].sum().backward()
""",
)
ZERO_DERIVATIVE_OF_VIEW = Refusal(
    UnsupportedMutationError,
    what="a derivative that is zero everywhere, such as the second one of `abs`, goes through a view",
    why="autograd uses special zero tensors there, and their fake versions lose their device at a view",
    hint="use other operators, such as torch.where(x < 0, -x, x) for x.abs()",
    example="""
def f(x):
    view = x.view(1, 2)
    view.cumsum_(0)
    return view.abs_()
x = torch.ones(2, requires_grad=True)
result = capture(f, (x * 1,))(x * 1).sum()
torch.autograd.grad(result, x, create_graph=True)[0].sum().backward()
""",
)
NO_FORMULA = Refusal(
    NoFormulaError,
    what="a gradient through {op}, for which autograd has no formula",
    why="eager differentiates the operators that its kernel calls, but a graph calls it as one operator",
    hint="register a formula with torch.library.register_autograd, or detach() its arguments if it has no gradient",
    example="""
library = torch.library.Library("mine_cubed", "DEF")
library.define("cube(Tensor x) -> Tensor")
library.impl("cube", lambda x: x * x * x, "CompositeExplicitAutograd")
capture(lambda x: torch.ops.mine_cubed.cube(x), (torch.ones(2, requires_grad=True),), gradients="now")
""",
)
LEAF_GIVEN_AWAY = Refusal(
    UnsupportedProgramError,
    what="the program returns or keeps a new tensor that requires gradients, and a tensor computed from it",
    why="a captured program has gradients only for its inputs",
    hint="pass the tensor as an argument, or detach it before it is returned or kept",
    example="""
def f(x): return (w := torch.ones(2, requires_grad=True)), x * w
capture(f, (torch.ones(2),))
""",
)
INTEGERS_WITH_GRADIENTS = Refusal(
    UnsupportedMutationError,
    what="a tensor of {dtype} requires gradients when the program ends",
    why="an in-place operator that autograd records wrote to it, but integers have no gradients",
    hint="detach() the value that is written to it, or use the out-of-place operator",
    example="""
def f(x, y): return x.eq_(y)
capture(f, (torch.ones(2, dtype=torch.int32), torch.ones(2, requires_grad=True)), gradients="now")
""",
)
INTEGERS_ASSIGNED_GRADIENTS = Refusal(
    UnsupportedProgramError,
    what="the program assigns a number that requires gradients to elements of an integer tensor",
    why="for fake tensors this assignment is an operator that autograd records",
    hint="assign the number's detach()",
    example="""
def f(x, y): x[:1] = y
capture(f, (torch.ones(2, dtype=torch.int32), torch.ones((), requires_grad=True)))
""",
)
VIEW_AT_UNKNOWN_OFFSET = Refusal(
    UnsupportedProgramError,
    what="a result is a view, at a data-dependent offset, of a tensor that requires gradients",
    why="the offset is unknown while the program is captured, and a call does not compute it",
    hint="return a copy of the view (`.clone()`), or capture with on_data='decide' and example data",
    no_example="no short program is known that leads here",
)
VIEW_NO_LONGER_ACCEPTED = Refusal(
    UnsupportedMutationError,
    what="the program returns or keeps a view that autograd no longer accepts",
    why="{reason}",
    hint="make the view after the write, or return a copy of it (`.clone()`)",
    example="""
def f(x):
    first = x.requires_grad_().split([1, 2])[0]
    with torch.no_grad():
        x.mul_(2)
    return first
capture(f, (torch.ones(3),))
""",
)
VERSION_OF_GRADIENT = Refusal(
    UnsupportedProgramError,
    what="the program reads the `_version` of a gradient",
    why="eager's autograd engine may accumulate gradients in place or not, and only the former counts as a write",
    hint="read the `_version` of a copy of the gradient (`.clone()`)",
    example="""
def f(x): return torch.autograd.grad((x * x).sum(), x)[0]._version
capture(f, (torch.ones(2, requires_grad=True),))
""",
)

# What a call writes to inputs that require gradients

DETACHED_AND_REQUIRED = Refusal(
    UnsupportedMutationError,
    what="the program detaches `{input}`, a computed tensor, in place, and then sets requires_grad again",
    why="the graph's backward cannot represent both the old and the new autograd history",
    hint="use the result of detach().requires_grad_()",
    example="""
def f(x): return x.detach_().requires_grad_()
capture(f, (torch.ones(2, requires_grad=True) * 2,))
""",
)
SET_TO_OTHER_INPUT = Refusal(
    UnsupportedMutationError,
    what="`{input}` is set to the memory of another input, which requires gradients",
    why="it requires gradients afterwards, which a call cannot record in autograd; eager has no gradient for `set_`",
    hint="use the other input directly",
    example="""
def f(x, y): return x.set_(y)
capture(f, (torch.ones(2), torch.ones(2, requires_grad=True)))
""",
)
PIECES_OF_WRITTEN = Refusal(
    UnsupportedMutationError,
    what="`{input}` is written, and the program splits (`split`, `unbind`) `{other}`, which is a part of the same "
    "tensor",
    why="autograd rejects such pieces after their memory is written through another tensor",
    hint="make the pieces one by one (`narrow`, `select`), or pass copies (`.clone()`)",
    example="""
def f(x, y): return x.split(1)[0] * y.mul_(2)
whole = torch.ones(4, requires_grad=True) * 1
capture(f, (whole[:2], whole[2:]))
""",
)
WRITTEN_WITH_OTHER = Refusal(
    UnsupportedMutationError,
    what="`{input}` is written, requires gradients, and shares memory with another input",
    why="the gradient of one input would have to flow through the other",
    hint="pass the tensor once, and make views of it inside the function",
    example="""
sizes, whole = {0: torch.export.Dim("n", max=7)}, torch.ones(8, requires_grad=True) * 1
program = capture(lambda x, y: x.mul_(2), (whole[:6], whole[2:]), dynamic_shapes=(sizes, sizes))
program(whole[:6], whole[2:])
""",
)
OVERLAPPING_INPUTS = replace(
    WRITTEN_WITH_OTHER,
    raises=OverlappingInputsError,
    example="",
    no_example="the call captures the program again, with both inputs as views of one tensor, and goes on",
)
WRITTEN_AT_OFFSET = Refusal(
    UnsupportedMutationError,
    what="`{input}` is written through `as_strided`, requires gradients, and has a storage offset",
    why="autograd would apply the same offset to the gradient, which has its own storage",
    hint="write through select, narrow or diagonal, or pass a copy (`.clone()`)",
    example="""
def f(x): x.as_strided((1,), (1,)).mul_(2)
part = (torch.ones(4, requires_grad=True) * 1)[2:]
capture(f, (part,), gradients="now")
""",
)
WRITTEN_BEYOND = Refusal(
    UnsupportedMutationError,
    what="the program writes memory beyond `{input}`, which requires gradients, through a view of it",
    why="autograd treats such a view as a view of the base, which is not an input of the program",
    hint="pass the base, and write through a view of it",
    example="""
def f(x): x[0].mul_(2)
x = (torch.ones(3, requires_grad=True) * 1).unfold(0, 2, 1)
capture(f, (x,), gradients="now")
""",
)
EXPANDED_WRITTEN = Refusal(
    UnsupportedMutationError,
    what="`{input}`, which requires gradients, is written, and several of its positions are the same element",
    why="a call writes each element once, through another tensor than the one that autograd records",
    hint="pass the tensor before expand(), and expand it inside the function",
    example="""
def f(x): x[:1].mul_(2)
x = (torch.ones(1, requires_grad=True) * 1).expand(2)
capture(f, (x,), gradients="now")
""",
)
OTHER_MEMORY = Refusal(
    UnsupportedMutationError,
    what="`{input}`, which requires gradients, changes its size, strides or memory",
    why="it gets other memory (`set_`, `.data =`), which a call cannot record in autograd",
    hint="return the new tensor instead",
    example="""
def f(x, y):
    x.add_(1)
    y.data = y * 2
whole = torch.ones(4) * torch.ones(4, requires_grad=True)
capture(f, (whole[0], whole[1:]), gradients="now")
""",
)
OTHER_SIZE = Refusal(
    UnsupportedMutationError,
    what=OTHER_MEMORY.what,
    why="autograd does not record the change, and computes a gradient of the size from before the call",
    hint="return the new tensor instead",
    example="""
def f(x):
    x.data = torch.ones(3)
    return x * 2
capture(f, (torch.ones(2, requires_grad=True),), gradients="now")
""",
)
RESHAPED_WITHOUT_GRAD_MODE = Refusal(
    UnsupportedMutationError,
    what="the size or strides of an input that requires gradients change in place (t_, squeeze_, `.data =`, ...) with "
    "grad mode off",
    why="autograd does not record the change, and computes a gradient for the old size and strides",
    hint="change it with grad mode on, or change a detached tensor",
    example="""
def f(x):
    torch.no_grad()(x.t_)()
    return x * 2
capture(f, (torch.ones(2, 2, requires_grad=True).clone(),), gradients="now")
""",
)

# Views that autograd replays

READS_BEYOND = Refusal(
    UnsupportedMutationError,
    what="`as_strided` reads memory beyond a tensor that requires gradients; later the memory is written, or metadata "
    "change in place (t_, squeeze_, ...)",
    why="autograd then treats the result as a view of the whole storage, which fake tensors do not represent",
    hint="call `as_strided` on the tensor that covers the whole storage",
    example="""
def f(x):
    view = (y := x * 1)[:1]
    part = view.as_strided((1,), (1,), 1)
    view.mul_(2)
    return part
capture(f, (torch.ones(2, requires_grad=True),), gradients="now")
""",
)
VIEW_AFTER_RESHAPE = Refusal(
    UnsupportedMutationError,
    what="a view is used after its metadata, or its base's, changed in place (squeeze_, t_, as_strided_), or after "
    "`.data =` replaced its data and its old base was written",
    why="for fake tensors, autograd replays the view operators, which now give other elements",
    hint=_OUT_OF_PLACE,
    example="""
def f(x):
    part = (whole := x * 2)[:2]
    whole.as_strided_((2,), (1,), 2)
    part.sum().backward()
capture(f, (torch.ones(4, requires_grad=True),))
""",
)
RESHAPED_AND_REPLAYED = Refusal(
    UnsupportedProgramError,
    what="a tensor that requires gradients changes its size or strides in place (squeeze_, t_, ...), and then: {error}",
    why="for fake tensors, autograd replays older views of the tensor, which may fail after the change",
    hint=_OUT_OF_PLACE,
    example="""
def f(x):
    view = x.squeeze(1)
    x.squeeze_(0).requires_grad_()
    return view
capture(f, (torch.ones(1, 1),))
""",
)
VIEW_REQUIRES_GRAD = Refusal(
    UnsupportedProgramError,
    what="the program sets requires_grad on a view, and then writes to the view's base",
    why=f"{_VIEW_AGAIN}, and finds a base that requires no gradients",
    hint="write first, or set requires_grad on a copy of the view (`.clone()`)",
    example="""
def f(x):
    leaf = x[0].requires_grad_()
    view = leaf.expand(2, 1)
    x.detach().add_(1)
    (view * view).sum().backward()
capture(f, (torch.ones(1, 1),))
""",
)
GRADIENT_OF_WRITTEN = Refusal(
    UnsupportedMutationError,
    what="the program computes the gradient of a non-contiguous tensor that was written after views of it were made",
    why=f"{_VIEW_AGAIN}, and the gradient gets other strides than in eager",
    hint="make the views after the write, or call backward() outside the captured program",
    example="""
def f(x):
    row = x.select(0, 1)
    with torch.no_grad():
        x.mul_(2)
    return torch.autograd.grad(row.sin().sum(), x)
capture(f, (torch.ones(2, 2).t().requires_grad_(),))
""",
)
OUT_WITH_VIEWS_RESIZED = Refusal(
    UnsupportedMutationError,
    what="an out= that requires gradients and has views is resized",
    why="autograd would replay the views on the resized tensor; eager's gradients fail there",
    hint="pass an out= of the right size, or one that is detached",
    example="""
def f(x):
    windows = x.unfold(0, 2, 3)
    torch.eq(torch.arange(1), 2, out=x)
    return windows.unbind(0)
capture(f, (torch.ones(6) * torch.ones(6, requires_grad=True),))
""",
)
