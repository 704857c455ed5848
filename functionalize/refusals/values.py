"""Refusals of what needs values while a program is captured: memory, data-dependent numbers, branches."""

from __future__ import annotations

from functionalize.errors import DataDependentError, UnsupportedMutationError, UnsupportedProgramError
from functionalize.refusals.refusal import Refusal

_CUSTOM_OPERATOR = "move it into a custom operator (torch.library.custom_op), which a capture records as one call"

ADDRESS_READ = Refusal(
    UnsupportedProgramError,
    what="the program reads the address of a tensor",
    why="a captured program runs on other tensors at each call",
    hint=f"call data_ptr() outside the captured program, or {_CUSTOM_OPERATOR}",
    example="capture(lambda x: x.data_ptr(), (torch.ones(2),))",
)
MEMORY_READ = Refusal(
    UnsupportedProgramError,
    what="the program makes a tensor from a Python list of tensors, or reads the memory of a tensor",
    why="tensors have no values while a program is captured",
    hint=f"make the tensor with torch.tensor or torch.stack, pass it as an argument, or {_CUSTOM_OPERATOR}",
    example="""
def f(x): return torch.FloatTensor([x, x])
capture(f, (torch.tensor(1.0),))
""",
)
ARRAY_OF_TENSOR = Refusal(
    UnsupportedProgramError,
    what="the program makes a NumPy array from a tensor",
    why="NumPy reads the values, and tensors have no values while a program is captured",
    hint=f"compute with torch, or {_CUSTOM_OPERATOR}",
    example="capture(lambda x: x.numpy(), (torch.ones(2),))",
)
STORAGE_BYTES_READ = Refusal(
    UnsupportedProgramError,
    what="the program reads the bytes of a storage",
    why="storages have no bytes while a program is captured",
    hint=f"use tensors (`x.view(torch.uint8)`), or {_CUSTOM_OPERATOR}",
    example="capture(lambda x: x.untyped_storage()[0], (torch.ones(2),))",
)
STORAGE_BYTES_ACCESSED = Refusal(
    UnsupportedMutationError,
    what="the program reads or writes the bytes of a storage directly (of a tensor of size {size})",
    why="storages have no bytes while a program is traced or captured",
    hint="use operations on tensors: `x.fill_(0)`, `x.copy_(y)`, `x.view(torch.uint8)`",
    example="capture(lambda x: x.untyped_storage().fill_(0), (torch.ones(2),))",
)
DATA_DEPENDENT_STORAGE = Refusal(
    UnsupportedProgramError,
    what="the program sets a tensor to a storage of data-dependent size",
    why="fake tensors cannot represent where the tensor is in that storage",
    hint="make a view of a tensor with that storage (view, as_strided)",
    no_example="no short program is known that leads here",
)
NUMBER_AS_KEY = Refusal(
    UnsupportedProgramError,
    what="the program puts a data-dependent number into a set or a dict, or looks it up there",
    why="the number is unknown while the program is captured",
    hint="call int() on the number (which then becomes a branch on its value), or use torch operators (torch.unique, "
    "torch.isin, an index)",
    example="""
import collections
capture(lambda x: x * len(collections.Counter([x.nonzero().size(0)])), (torch.ones(2),))
""",
)
BOOL_AS_OPTION = Refusal(
    UnsupportedProgramError,
    what="the program passes a data-dependent condition as an option of an operator",
    why="options of torch operators must be plain bools",
    hint="call bool() on the condition (which then becomes a branch on its value)",
    example="""
def f(x): return x.sum(0, keepdim=x.sum().item() > 1)
capture(f, (torch.ones(2),), on_data="raise")
""",
)
NUMBER_AS_PLAIN = Refusal(
    UnsupportedProgramError,
    what="the program passes a data-dependent number (a {kind}) to a function that takes only plain Python numbers",
    why="while a program is captured, such a number is a symbol for the numbers of all calls",
    hint="call float() or int() on it (which then becomes a branch on its value), or compute with tensors",
    example="""
import json
capture(lambda x: json.dumps(x.sum().item()), (torch.ones(2),))
""",
)
NUMBER_AS_NUMPY_SEED = Refusal(
    UnsupportedProgramError,
    what="the program seeds a NumPy generator with a data-dependent number",
    why="the number is unknown while a program is captured, and NumPy would draw only once, at the capture",
    hint="draw with torch, or outside the captured program",
    example="""
import numpy
capture(lambda x: x * numpy.random.default_rng(x.sum().int().item()).random(), (torch.ones(2),))
""",
)
ARRAY_OF_NUMBERS = Refusal(
    UnsupportedProgramError,
    what="the program makes a tensor from a NumPy array of data-dependent numbers",
    why="such numbers have no values while the program is captured, so NumPy holds them as objects",
    hint="pass the numbers, or a list of them, to torch.tensor()",
    example="""
import numpy
capture(lambda x: torch.as_tensor(numpy.array([x.sum().item()])), (torch.ones(2),))
""",
)
TEXT_OF_TENSOR = Refusal(
    UnsupportedProgramError,
    what="{path} contains the text of a tensor: {text!r}",
    why="the values of tensors are unknown while the program is captured",
    hint="keep the tensor itself, or the text of numbers (`str(x.item())`, `str(x.tolist())`)",
    example="capture(lambda x: str(x), (torch.ones(2),))",
)
TENSOR_SAVED = Refusal(
    UnsupportedProgramError,
    what="the program saves a tensor (torch.save, pickle)",
    why="the file would hold values, which do not exist while a program is captured",
    hint="save outside the captured program; to copy a tensor inside it, use clone() or copy.deepcopy()",
    example="""
import io
capture(lambda x: torch.save(x, io.BytesIO()), (torch.ones(2),))
""",
)
BRANCH = Refusal(
    DataDependentError,
    what="the program branches on the value of a tensor",
    why="{reason}",
    hint="pass example inputs with data and on_data='decide'; use torch.cond or torch.where instead of `if`; keep "
    "tensors instead of numbers from `.item()`; state what you know about a size with torch._check; pass "
    "is_exporting=True if a library branches only in eager; pass capturable=True to an optimizer",
    example="""
def f(x): return x if x.sum() > 0 else -x
capture(f, (torch.ones(2),), on_data="raise")
""",
)
BRANCH_IN_BACKWARD = Refusal(
    DataDependentError,
    what="{derivative} of a captured program branches on the value of a tensor",
    why="the backward is captured together with the forward, without data",
    hint="use torch.where or torch.cond instead of `if`, or compute the gradients inside the captured program",
    example="""
class Clip(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(lambda ctx, g: g if g.sum() > 0 else -g)
capture(Clip.apply, (torch.ones(2, requires_grad=True),), gradients="now")
""",
)
TOO_MANY_VARIANTS = Refusal(
    DataDependentError,
    what="the calls of the program take more than {bound} different ways through branches on tensor values",
    why="each way is a variant, which is captured and kept; here the value is {answer!r}, and no variant so far has "
    "this value here and the same values before",
    hint="pass a larger cache_size; use tensors instead of numbers if each number needs a variant; use torch.where or "
    "torch.cond; program.variants lists the ways",
    example="""
program = capture(lambda x: x if x.sum() > 0 else -x, (torch.ones(2),), cache_size=1)
program(-torch.ones(2))
""",
)
OTHER_BRANCH_AGAIN = Refusal(
    DataDependentError,
    what="the program takes another branch when it runs on the same data again",
    why="the value was {before!r} in the capture, and {now!r} in the call: a kernel is not deterministic, or the "
    "value depends on something besides the data",
    hint="use torch.use_deterministic_algorithms(True), or branch on values that rounding does not change",
    no_example="a kernel has to give another result for the same data",
)
SIZES_BROKEN = Refusal(
    DataDependentError,
    what="data-dependent sizes ({sizes}) do not satisfy {condition}",
    why="the operator supports only such sizes, or the trace assumed them: where a data-dependent size met a "
    "constant, the trace assumed that both are equal, but eager may broadcast",
    hint="state what you know about the size before (torch._check), or expand the tensor of one element explicitly",
    example="""
program = capture(lambda x: x[x > 0].expand(2), (torch.ones(2),), on_data="raise")
program(torch.tensor([1.0, -1.0]))
""",
)
SIZES_REJECTED = Refusal(
    DataDependentError,
    what="an operator of the graph rejects data-dependent sizes",
    why=f"{SIZES_BROKEN.why}; it raised: {{error}}",
    hint=SIZES_BROKEN.hint,
    example="""
program = capture(lambda x: x[x > 0].view(2, -1), (torch.ones(4),))
program(torch.tensor([1.0, 1.0, 1.0, -1.0]))
""",
)
OTHER_RANK = Refusal(
    DataDependentError,
    what="a tensor has {now} dimensions in this call, and had {before} when the program was captured",
    why="squeeze() removes dimensions of size 1, and which dimensions those are is data-dependent",
    hint="pass a dimension that always has size 1 to squeeze(), or capture with on_data='decide'",
    example="""
program = capture(lambda x: x.nonzero().squeeze(), (torch.ones(2),), on_data="raise")
program(torch.tensor([1.0, 0.0]))
""",
)
PADDED_SEQUENCE_PACKED = Refusal(
    UnsupportedProgramError,
    what="the program packs a padded sequence (pack_padded_sequence, pack_sequence)",
    why="torch's recurrent layers read the batch size of each step from the data, and no operator of a graph computes "
    "that",
    hint="run the layer on the padded tensor and mask the positions beyond each length, or pack outside the captured "
    "program",
    example="""
def f(x, lengths): return torch.ops.aten._pack_padded_sequence(x, lengths, False)
capture(f, (torch.ones(2, 2, 1), torch.tensor([2, 1])))
""",
)
LEAST_SQUARES_DEVICE = Refusal(
    UnsupportedProgramError,
    what="the program solves least squares (linalg.lstsq) on the device {device!r}",
    why="the results of this device's kernel have shapes that torch does not define before it runs; only those of the "
    "CPU's kernel are known",
    hint="use torch.linalg.pinv or torch.linalg.qr, or solve it on the CPU",
    example="""
def f(a): return torch.linalg.lstsq(a, a)
capture(f, (torch.ones(2, 2, device="meta"),))
""",
)
LEAST_SQUARES_DRIVER = Refusal(
    UnsupportedProgramError,
    what="the program solves least squares by the driver {driver!r}, for more equations than unknowns",
    why="it returns residuals only for matrices of full rank, which is data-dependent",
    hint="use another driver ('gels', 'gelsy'), and compute the residuals from the solution if you need them",
    example="""
def f(a): return torch.linalg.lstsq(a, a, driver="gelsd")
capture(f, (torch.ones(3, 2),))
""",
)
ACTS_BESIDE_BRANCH = Refusal(
    UnsupportedProgramError,
    what="{op}, which has side effects and returns nothing, in a program that branches on tensor values",
    why="it would run one time more than in eager: {reason}",
    hint="use torch.where or torch.cond instead of `if`, or capture the code before the branch and the code after it "
    "separately",
    example="""
log = torch.library.custom_op("mine::log", lambda x: None, mutates_args=(), schema="(Tensor x) -> ()")
log.register_fake(lambda x: None)
def f(x):
    log(x)
    return x if torch.rand(()) > 0.5 else -x
capture(f, (torch.ones(2),))
""",
)
COLLECTIVE_BESIDE_BRANCH = Refusal(
    UnsupportedProgramError,
    what="{op}, a collective operation, in a program that branches on tensor values",
    why=ACTS_BESIDE_BRANCH.why,
    hint=ACTS_BESIDE_BRANCH.hint,
    no_example="torch.distributed has to be initialized",
)
OUT_OF_STEP = Refusal(
    UnsupportedProgramError,
    what="{op}, where the same call has communicated by {before}",
    why="the call started again, and the program communicates in another way this time",
    hint="let what the program communicates depend on its inputs alone, not on time or on Python's own random numbers",
    no_example="torch.distributed has to be initialized",
)
RUNS_ONCE = Refusal(
    UnsupportedProgramError,
    what="the program cannot run as it is: the call has communicated already, and would do so once more",
    why="{reason}",
    hint="capture the code before the communication and the code after it separately",
    no_example="torch.distributed has to be initialized",
)
DISAGREE = Refusal(
    UnsupportedProgramError,
    what="the ranks of group {group} do not capture the same program, or not at the same time",
    why="{reason}",
    hint="capture on all ranks of a group, with examples for which all ranks communicate in the same order",
    no_example="it needs several processes",
)
CUDNN_DROPOUT = Refusal(
    UnsupportedProgramError,
    what="recurrent layers on a GPU with dropout between them",
    why="cuDNN draws the random numbers from a state that cannot be read or set",
    hint="pass dropout=0, or use a module per layer with torch.nn.Dropout between them",
    no_example="it needs a GPU",
)
