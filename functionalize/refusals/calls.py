"""Refusals of calls: what a captured program cannot do when it is called, differentiated, copied or transformed."""

from __future__ import annotations

from functionalize.errors import NotCapturedWarning
from functionalize.refusals.refusal import Refusal

_INSIDE = "compute the gradients (torch.autograd.grad(..., create_graph=True)) inside the captured program"

CALLED_IN_TRANSFORM = Refusal(
    RuntimeError,
    what="a captured program is called inside torch.func.grad, vmap, jvp, dual_level or a similar transform",
    why="the program computes with plain tensors, so the transform would treat its results as constants",
    hint="capture a function that applies the transform, or transform the original",
    example="""
program = capture(lambda x: x.sum(), (torch.ones(2),))
torch.func.grad(program)(torch.ones(2))
""",
)
NO_JOINT_GRAPH = Refusal(
    RuntimeError,
    what="the program has no joint graph of forward and backward for these arguments",
    why="none of its results depends on an input that requires gradients, or gradients are off",
    hint="pass inputs that require gradients, outside of torch.no_grad()",
    example="capture(torch.sin, (torch.ones(2),)).joint_graph(torch.ones(2))",
)
PROGRAM_COPIED = Refusal(
    TypeError,
    what="a captured program cannot be copied or pickled",
    why="it reads and writes the state that it was captured with, and a copy would share that state",
    hint="copy the model and capture the copy, or save the program: "
    "`torch.export.save(program.to_exported_program(), path)`",
    example="""
import copy
copy.deepcopy(capture(torch.sin, (torch.ones(2),)))
""",
)
FAKES_NOT_ACCEPTED = Refusal(
    NotCapturedWarning,
    what="an operator accepted the inputs of a call, but not fake tensors like them: {reason}",
    why="no captured variant fits this call, and a new variant could not be captured",
    hint="nothing is required: the original ran instead; to have such calls captured, remove that operator",
    no_example="it is a warning, for a call whose inputs no captured program fits",
)
NUMBERS_VARY = Refusal(
    NotCapturedWarning,
    what="the program passes data-dependent floats to code that takes only Python numbers, in more than {bound} calls",
    why="each float needs a separate variant, so the original runs for this call and for later ones like it",
    hint="return the tensor; or only print the float, or append it (or its text) to a list",
    example="""
import warnings
warnings.simplefilter("error")
program = capture(lambda x: f"{x.sum():.1f}", (torch.ones(2),), cache_size=1)
program(torch.zeros(2))
""",
)
WAYS_VARY = Refusal(
    NotCapturedWarning,
    what="the calls of a program that communicates take more than {bound} different ways through branches on tensor "
    "values",
    why="each way needs a separate variant, so the original runs for this call and for later ones like it: other ranks "
    "would wait for a rank that raises",
    hint="pass a larger cache_size; use torch.where or torch.cond; program.variants lists the ways",
    no_example="it needs processes that communicate",
)
CHANGES_STATE_TWICE = Refusal(
    RuntimeError,
    what="the program changes Python state",
    why="it runs again for its second derivative, and would find other state than in the first run",
    hint=_INSIDE,
    example="""
calls = [0]
def f(x):
    calls[0] += 1
    return x.sin()
x = torch.ones(2, requires_grad=True)
first = torch.autograd.grad(capture(f, (x,))(x).sum(), x, create_graph=True)[0]
first.sum().backward()
""",
)
COMPUTES_SOMETHING_ELSE = Refusal(
    RuntimeError,
    what="the program now computes something else than when it was captured",
    why="it runs again for its second derivative, and Python state has changed since the call",
    hint=_INSIDE,
    no_example="no short program is known that leads here",
)
BACKWARD_OF_BACKWARD = Refusal(
    RuntimeError,
    what="a backward through a result of a captured program that itself calls backward()",
    why="the backward inside the program is part of its graph, and has freed its saved tensors",
    hint="capture the forward alone, and call backward() on its results",
    example="""
def f(w, x):
    x[0] = 2
    w.grad = None
    (w * w).sum().backward()
w, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2
capture(f, (w, x))(w, x)
x.sum().backward()
""",
)
BATCHED_TWICE = Refusal(
    RuntimeError,
    what="a batch of gradients of a captured program (is_grads_batched=True) cannot be differentiated "
    "(create_graph=True)",
    why="torch has no batching rule for the function that computes these gradients",
    hint="compute one gradient at a time, or call torch.autograd.grad inside the captured program",
    example="""
x = torch.ones(2, requires_grad=True)
y = capture(torch.sin, (x,))(x)
torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, create_graph=True)
""",
)
VALUE_NOT_KEPT = Refusal(
    RuntimeError,
    what="the derivative of order {order} of a captured program needs the value of `{name}`, which lower derivatives "
    "do not need",
    why="a call keeps only the inputs that its gradients are computed from, and this one was freed or written since",
    hint=_INSIDE,
    no_example="no short program is known that leads here",
)
SHARED_GRADIENT_WRITTEN = Refusal(
    RuntimeError,
    what="a backward writes in place to the gradient of one result, whose memory the gradient of another result shares",
    why="in eager, the other gradient changes or not, depending on the order in which the engine runs",
    hint="write to a copy in the backward (`gradient.clone()`)",
    example="""
class Doubled(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 1)
    backward = staticmethod(lambda ctx, g: g.mul_(2))
x, gradient = torch.ones(2, requires_grad=True), torch.ones(2)
results = capture(lambda x: (Doubled.apply(x.sin()), x * 2), (x,))(x)
torch.autograd.grad(results, x, [gradient, gradient])
""",
)
BACKWARD_TWICE = Refusal(
    RuntimeError,
    what="Trying to backward through a call of a captured program a second time",
    why="all results of a call share one backward, and the first backward freed its saved tensors",
    hint="sum the results and call backward() once (or torch.autograd.backward([y, z], ...)), or pass "
    "retain_graph=True to all backwards but the last",
    example="""
x = torch.ones(2, requires_grad=True)
y, z = capture(lambda x: (x.sin(), x.cos()), (x,))(x)
y.sum().backward(), z.sum().backward()
""",
)
BACKWARD_NOT_CAPTURED = Refusal(
    RuntimeError,
    what="{derivative} of a captured program cannot be captured: {error}",
    why="an autograd formula raised this error while the backward was traced with fake tensors",
    hint="write the program without in-place writes to views, or compute the gradients in eager",
    example="""
class Broken(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(lambda ctx, g: g.view(3))
capture(Broken.apply, (torch.ones(2, requires_grad=True),), gradients="now")
""",
)
USED_BY_OTHER_THREAD = Refusal(
    RuntimeError,
    what="this thread runs a model, or an object, that another thread is capturing",
    why="its tensors are replaced by fake tensors until the capture ends",
    hint="finish the capture before other threads run the model, or let the threads share a lock",
    example="""
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
pool.submit(int).result()
capture(lambda x: pool.submit(lambda: x * 2).result(), (torch.ones(2),))
""",
)
NUMBER_AS_DYNAMIC = Refusal(
    ValueError,
    what="dynamic_shapes has {spec!r} for {name!r}, which is the number {value!r}",
    why="a number among the arguments is a constant of the program: each value needs a separate program",
    hint='Dim.AUTO or None; on_guard_failure="recapture" for calls with other numbers; or a tensor instead of the '
    "number",
    example="""
from torch.export import Dim
capture(lambda x, n: x * n, (torch.ones(2), 3), dynamic_shapes=(None, Dim("n")))
""",
)
CUDA_IN_FAKE_MODE = Refusal(
    RuntimeError,
    what="a CUDA tensor in fake_mode, on a machine without CUDA",
    why="code that runs in this mode would fail without it",
    hint="fake_mode(fake_cuda=True)",
    no_example="a machine with a GPU does not show it",
)
