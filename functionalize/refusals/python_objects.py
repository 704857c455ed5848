"""Refusals of Python objects: what a program changes, makes or reaches that a call could not change, make or check."""

from __future__ import annotations

from functionalize.errors import UnsupportedProgramError
from functionalize.refusals.refusal import Refusal

_OWN_LIST = "a call reads the numbers of such a list, and not the list itself, which may differ from call to call"
_COPIED = "a captured program cannot do this: its graph holds a copy, or the memory of the time of the capture"
_ARRAY = "the program {did} a tensor of size {size} in the memory of {memory}"

ITERATOR = Refusal(
    UnsupportedProgramError,
    what="{object} is a {kind}, an iterator",
    why="each next() changes the iterator, which a call of a captured program cannot do",
    hint="pass the result of next() as an argument",
    example="""
batches = iter([1, 2])
capture(lambda x: x * next(batches), (torch.ones(2),))
""",
)
THREAD_STARTED = Refusal(
    UnsupportedProgramError,
    what="the program starts a thread",
    why="a capture records one thread, so the thread's computation would not be part of the program",
    hint="compute in one thread, or start the threads around the captured program",
    example="""
import threading
capture(lambda x: threading.Thread(target=print).start(), (torch.ones(2),))
""",
)
STREAM_USED = Refusal(
    UnsupportedProgramError,
    what="the program {action}",
    why="a call runs its whole graph on the current stream, and waits for no other",
    hint="keep streams and events outside the captured program: wait, or select a stream, around its calls",
    no_example="it needs a GPU",
)
CODE_CHANGED = Refusal(
    UnsupportedProgramError,
    what="the program changes {places}",
    why="the change selects which code runs, or which dict has the attributes, and a captured program has what it met",
    hint="make the change outside the captured program, or branch on an attribute (`if self.ready: ...`)",
    example="""
def scaled(x, factor=2): return x * factor
def f(x): scaled.__defaults__ = (3,)
capture(lambda x: (f(x), scaled(x)), (torch.ones(2),))
""",
)
CONTENTS_CHANGED = Refusal(
    UnsupportedProgramError,
    what="the program changes the contents of `{path}`, a {kind}",
    why="the contents of this class cannot be set from outside, so a call could not repeat the change",
    hint="keep it in an attribute, a list or a dict",
    example="""
import threading
held = threading.local()
def f(x): held.steps = 1
capture(lambda x: (f(x), hasattr(held, "steps")), (torch.ones(2),))
""",
)
WEAK_KEYS_CHANGED = Refusal(
    UnsupportedProgramError,
    what="the program changes `{path}`, a dict whose keys are weak references to tensors",
    why="an entry disappears together with its tensor, and a call cannot know when",
    hint="put an object there before the call, and change its attributes; or use a dict whose keys are the tensors "
    "themselves",
    example="""
from torch.utils.weak import WeakTensorKeyDictionary
seen = WeakTensorKeyDictionary()
def f(x): seen[x] = 1
capture(f, (torch.ones(2),))
""",
)
OBJECT_MADE = Refusal(
    UnsupportedProgramError,
    what="{path}, {kind}, was made by the program{holds}",
    why="each call has to make a new object, but the contents of this one cannot be read and set from Python",
    hint="return the tensors themselves, or put them into a list, a dict or an object of a class written in Python",
    example="capture(lambda x: (row for row in x), (torch.ones(2),))",
)
TENSOR_HELD_ELSEWHERE = Refusal(
    UnsupportedProgramError,
    what="a tensor of size {size} that the program computes is still held by {holder}",
    why="a call can store tensors only in objects that the program reaches from its functions and arguments, and it "
    "does not reach this one",
    hint="return the tensor, or keep it in a list, a dict or an attribute that the program names",
    example="""
import queue
hidden = queue.SimpleQueue()
capture(lambda x: hidden.put(x * 2), (torch.ones(2),))
""",
)
GRADIENT_LEFT_ELSEWHERE = Refusal(
    UnsupportedProgramError,
    what="the program leaves a gradient on a tensor of size {size} that is not part of its state",
    why="a tensor that only C++ code, or a module that the program calls, holds is a constant of the graph",
    hint="give the program access to it by a variable, an attribute or an argument",
    example="""
times = torch.nn.Parameter(torch.ones(2)).mul
capture(lambda x: times(x).sum().backward(), (torch.ones(2),))
""",
)
ATTRIBUTE_SET = Refusal(
    UnsupportedProgramError,
    what="the program sets the attribute `{name}` of {tensor}",
    why="each call has other tensors, and would have to set the attribute on those",
    hint="keep the value in a list, a dict or an attribute of an object that the program names",
    example="""
def f(x): x.note = 1
capture(f, (torch.ones(2),))
""",
)
ATTRIBUTE_READ = Refusal(
    UnsupportedProgramError,
    what="the program reads the attribute `{name}` of {tensor}, a {kind}",
    why="the contents of such an object may change, and calls do not check them on tensors",
    hint="keep it in an attribute of a module, or in a dict whose keys are names of tensors",
    example="""
x = torch.ones(2)
x.scales = [2]
capture(lambda x: x * x.scales[0], (x,))
""",
)
HYPERPARAMETERS_KEPT = Refusal(
    UnsupportedProgramError,
    what="the program returns or keeps the list that contains `{path}`, and the numbers of that list are inputs",
    why=_OWN_LIST,
    hint="return or keep a copy of the list",
    no_example="the capture then takes the numbers as constants, and goes on",
)
HYPERPARAMETERS_CHANGED = Refusal(
    UnsupportedProgramError,
    what="the program changes the list that contains `{path}`, and the numbers of that list are inputs",
    why=_OWN_LIST,
    hint="assign a new list to the attribute, or keep the numbers in a tensor",
    no_example="the capture then takes the numbers as constants, and goes on",
)
DEFAULT_DTYPE_SET = Refusal(
    UnsupportedProgramError,
    what="the program sets another default dtype, so that {op} returns {dtype}",
    why="a call runs the whole graph under one default dtype",
    hint="set the dtype of each tensor with `dtype=` or `.to()`",
    example="""
def f(x):
    torch.set_default_dtype(torch.float64)
    y = x.logsumexp(0)
    torch.set_default_dtype(torch.float32)
    return y
capture(f, (torch.arange(2),))
""",
)

# Memory of arrays

ARRAY_WRITTEN = Refusal(
    UnsupportedProgramError,
    what="the program writes to {source}",
    why="a call runs only torch operators: what the capture wrote or drew once would be the same in all calls",
    hint="write to a tensor that is made from the array before: torch.tensor(array)",
    example="""
import numpy
array = numpy.zeros(2)
def f(x): array[0] += 1
capture(f, (torch.ones(2),))
""",
)
ARRAY_MEMORY_WRITTEN = Refusal(
    UnsupportedProgramError,
    what=_ARRAY,
    why=_COPIED,
    hint="write to a copy (`torch.tensor(array)`), or keep a tensor instead of the array",
    example="""
import numpy
array = numpy.zeros(2)
capture(lambda x: torch.from_numpy(array).add_(1), (torch.ones(2),))
""",
)
ARRAY_MEMORY_GIVEN = Refusal(
    UnsupportedProgramError,
    what=_ARRAY,
    why=_COPIED,
    hint="return a copy (`torch.tensor(array)`), or keep a tensor instead of the array",
    example="""
import numpy
array = numpy.zeros(2)
capture(lambda x: torch.from_numpy(array), (torch.ones(2),))
""",
)
ARRAY_MEMORY_MISSED = Refusal(
    UnsupportedProgramError,
    what=_ARRAY,
    why=_COPIED,
    hint="make the tensor from a copy of the array (`torch.tensor(array)`)",
    example="""
import numpy
def f(x):
    array = numpy.zeros(2)
    tensor = torch.from_numpy(array)
    array[0] = 1
    return tensor * x
capture(f, (torch.ones(2),))
""",
)
