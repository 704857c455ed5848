"""Refusals of writes that no functional program can express: shared elements, storages, metadata, `.data =`, `out=`."""

from __future__ import annotations

from functionalize.errors import UnsupportedMutationError, UnsupportedProgramError
from functionalize.refusals.refusal import Refusal

_UNSEEN = "a write to a tensor of shape {size}"
_COPY_OF_PARTS = "compute a new tensor from the changed parts, or write to a copy from `.to_dense()` or `.dequantize()`"

# Elements that several positions or arguments share

SHARED_ELEMENTS = Refusal(
    UnsupportedMutationError,
    what="{op} writes to a tensor of size {size} and strides {strides}, some positions of which are the same element",
    why="eager writes such an element once for each of its positions, in an order that depends on the kernel",
    hint="write to a copy (`.clone()`), or call the function outside the traced function",
    example="""
def f(x): return x.as_strided((3, 2), (1, 1)).cumsum_(0)
capture(f, (torch.ones(4),))
""",
)
READS_WHAT_IT_WRITES = Refusal(
    UnsupportedMutationError,
    what="{op} writes to {tensor} and reads the same elements at other positions, through `{argument}`",
    why="eager's kernel reads some elements before it writes them and some after: its result depends on sizes, device "
    "and threads (eager itself checks only tensors without gaps)",
    hint="pass a copy (`.clone()`) as `{argument}` (in an assignment, the right side)",
    example="""
def f(x): return x.sub_(x[:, :1])
capture(f, (torch.ones(2, 3),))
""",
)
TWO_OUTPUTS_SHARE = Refusal(
    UnsupportedMutationError,
    what="{op} writes `{argument}` and `{other}`, which share elements",
    why="eager's result depends on the order in which its kernel writes them",
    hint="pass tensors that share no memory",
    example="""
def f(x, y): return torch.frexp(x, out=(y, y.view(torch.int32)))
capture(f, (torch.ones(2), torch.ones(2)))
""",
)
OUT_RESIZED_INTO_OPERANDS = Refusal(
    UnsupportedMutationError,
    what="{op} resizes its out= to {size}, into memory that it reads or writes",
    why="eager's result then depends on the order in which its kernel visits the elements",
    hint="pass an out= of the right size, or one that shares no memory with the arguments",
    example="""
def f(x): return torch.clamp(x[:, :2], -1, 2, out=x[:, 2:])
capture(f, (torch.ones(4, 3),))
""",
)
DATA_DEPENDENT_WRITE = Refusal(
    UnsupportedMutationError,
    what="{op} on tensors with data-dependent sizes",
    why="its functional variant, {variant}, cannot be traced with such sizes",
    hint="use other operators, or state what you know about the sizes with torch._check",
    no_example="it needs an operator that torch can trace with data-dependent sizes in place, but not out of place",
)

# Parts of tensors that have no strides

SPARSE_PART_WRITTEN = Refusal(
    UnsupportedMutationError,
    what=_UNSEEN,
    why="it is {op} of a tensor, and {reason}",
    hint=_COPY_OF_PARTS,
    example="""
def f(x): return x.values().mul_(2)
capture(f, (torch.eye(2).to_sparse().coalesce(),))
""",
)
SPARSE_PART_READ = Refusal(
    UnsupportedMutationError,
    what=_UNSEEN,
    why="its part {op} was read, and would not see the write",
    hint=_COPY_OF_PARTS,
    example="""
def f(x):
    values = x.values()
    x.mul_(2)
    return values
capture(f, (torch.eye(2).to_sparse().coalesce(),))
""",
)
SPARSE_MADE_OF = Refusal(
    UnsupportedMutationError,
    what=_UNSEEN,
    why="it is a part of the result of {op}, which would not see the write",
    hint=_COPY_OF_PARTS,
    example="""
def f(x):
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x, (2,))
    x.add_(1)
    return sparse
capture(f, (torch.ones(2),))
""",
)
QUANTIZED_WRITTEN = Refusal(
    UnsupportedMutationError,
    what=_UNSEEN,
    why="it is the result of {op}, which fake tensors treat as an ordinary tensor",
    hint=_COPY_OF_PARTS,
    example="""
def f(x): return torch.quantize_per_tensor(x, 0.5, 0, torch.quint8).relu_()
make_fx(functionalize(f), tracing_mode="fake")(torch.ones(2))
""",
)
OPERAND_PERHAPS_RETURNED = Refusal(
    UnsupportedMutationError,
    what=_UNSEEN,
    why="{op} may have returned an operand: result and operand may share memory",
    hint=_COPY_OF_PARTS,
    example="""
def f(x): return torch.cond(x.sum() > 3, lambda a: a, lambda a: a * 1, (x,)).add_(1)
make_fx(torch.no_grad()(functionalize(f)), tracing_mode="fake")(torch.ones(2))
""",
)
STILL_A_VIEW = Refusal(
    UnsupportedMutationError,
    what=_UNSEEN,
    why="its `.data` was replaced, but autograd still treats it as a view, and the write as one to the view's base",
    hint=_COPY_OF_PARTS,
    example="""
def f(x):
    part, new = (x * 2)[0], torch.ones(())
    part.data = new
    new.add_(1)
    return part
capture(f, (torch.ones(2, requires_grad=True),))
""",
)
BOOL_WRITTEN_AS_BYTES = Refusal(
    UnsupportedMutationError,
    what="a bool tensor is written through a view of dtype {dtype}",
    why="kernels that copy bools keep only whether each byte is zero",
    hint="allocate the memory as torch.uint8, and view it as torch.bool",
    example="""
def f(mask): return mask.view(torch.float32)[0].fill_(2)
capture(f, (torch.ones(4, dtype=torch.bool),))
""",
)

# Storages

STORAGE_OF_UNKNOWN_SIZE = Refusal(
    UnsupportedMutationError,
    what="a tensor of size {size} is resized in a storage that is larger than the tensor",
    why="the size of that storage depends on sizes for which the graph has no symbol",
    hint="trace with static shapes (tracing_mode='fake'), or resize a tensor that fills its storage",
    example="""
part = torch.empty(0).set_(torch.arange(12.0).untyped_storage(), 0, (2,), (1,))
make_fx(functionalize(lambda x: x.resize_(13)[12:].fill_(1)), tracing_mode="symbolic")(part)
""",
)
STORAGE_OF_DATA_DEPENDENT_SIZE = Refusal(
    UnsupportedMutationError,
    what="a tensor of size {size} in a resized storage, which held a tensor of size {old}",
    why="the size of the storage before it was resized is data-dependent",
    hint="allocate a new tensor of the final size, and copy the old elements into it",
    example="""
def f(x): return x[x > 0].resize_(4, 3)
capture(f, (torch.ones(2),))
""",
)
STORAGE_SHARED_UNKNOWN = Refusal(
    UnsupportedMutationError,
    what="a tensor of size {size} at offset {offset} shares a storage with one of size {other}",
    why="which elements the two share depends on sizes that are unknown while the program is traced",
    hint="trace with static shapes (tracing_mode='fake'), or pass tensors that do not share a storage",
    example="""
def f(x): return torch.sub(x[x > 0], 2, out=x.split([3, 0], 1)[1])
capture(f, (torch.arange(24.0)[7:].as_strided((1, 3), (6, 2)),))
""",
)
OUT_BEYOND_SHARED_STORAGE = Refusal(
    UnsupportedMutationError,
    what="{op} resizes its out= beyond the {held} bytes that it shares with other tensors",
    why="the new size of the storage is data-dependent",
    hint="compute a new tensor, and copy it into the target",
    example="""
def f(x):
    first, second = x.t().vsplit(2)
    torch.stack([x.nonzero(), x.nonzero()], out=first)
    return second
capture(f, (torch.ones(1, 4, dtype=torch.int16),))
""",
)
NOT_STRIDED_RESIZED = Refusal(
    UnsupportedMutationError,
    what="a resize of a tensor of layout {layout}",
    why="in a graph only strided tensors can be resized",
    hint="allocate a new tensor of that size",
    example="""
def f(x): return x.to_sparse().sparse_resize_((4, 4), 2, 0)
make_fx(functionalize(f))(torch.eye(2))
""",
)
STORAGE_RESIZED = Refusal(
    UnsupportedProgramError,
    what="the program resizes the storage of a tensor of size {size}",
    why="the resize is not an operator, so a call could not repeat it",
    hint="resize it before or after the program is called, or free it with `x.data = torch.empty(0)`",
    example="""
def f(x): x.untyped_storage().resize_(0)
capture(f, (torch.ones(2),))
""",
)
SET_TO_DEAD_STORAGE = Refusal(
    UnsupportedMutationError,
    what="set_ to a storage of {nbytes} bytes without a live tensor",
    why="the graph knows the contents of a storage by its tensors, and none is left",
    hint="call set_ with a tensor, or keep a tensor of that storage alive",
    example="""
def f(x): return torch.empty(0).set_((x * 2).untyped_storage(), 0, (2,))
capture(f, (torch.ones(2),))
""",
)
SET_BEYOND_STORAGE = Refusal(
    UnsupportedMutationError,
    what="set_ to a storage, called without strides, keeps the strides {strides}, which reach beyond that storage",
    why="eager would read and write memory outside the storage",
    hint="pass the strides as well",
    example="""
def f(x): return x.set_((x * 2).untyped_storage())
capture(f, (torch.arange(3.0)[::2],))
""",
)

# Metadata and `.data =`

CONSTANT_RESHAPED = Refusal(
    UnsupportedMutationError,
    what="the size or strides of {tensor}, which is not an input, change in place",
    why="the tensor is a constant of the graph: a call can write its data back, but not its size and strides",
    hint="pass it as an argument (the state of a module by torch.func.functional_call)",
    example="""
table = torch.ones(2, 3)
make_fx(functionalize(lambda x: table.t_() @ x))(torch.ones(2))
""",
)
DATA_OF_OTHER_SHAPE = Refusal(
    UnsupportedMutationError,
    what="`.data =` changes the size or strides of a computed tensor that requires gradients",
    why="autograd would compute its gradient for the old size and strides",
    hint="use the new tensor itself, or assign to `.data` of a detached tensor",
    example="""
def f(x):
    y = x * 2
    y.data = torch.ones(3)
    return y
capture(f, (torch.ones(2, requires_grad=True),))
""",
)
DATA_OF_OTHER_DTYPE = Refusal(
    UnsupportedMutationError,
    what="`.data =` changes the dtype of an input from {before} to {after}",
    why="no operator can change the dtype of a graph's input in place",
    hint="return the new tensor, and assign it to `.data` outside the traced function",
    example="""
def f(x): x.data = x.double()
capture(f, (torch.ones(2),))
""",
)
DATA_LAZILY_NEGATED = Refusal(
    UnsupportedMutationError,
    what="`.data =` changes whether an input is lazily conjugated or negated",
    why="no operator can change that for a graph's input in place",
    hint="assign the tensor's `.resolve_conj()` or `.resolve_neg()`",
    example="""
def f(x): x.data = x.conj()
capture(f, (torch.ones(2) * 1j,))
""",
)
LAZY_IN_INFERENCE_MODE = Refusal(
    UnsupportedMutationError,
    what="{op} on a lazily conjugated or negated tensor in inference mode",
    why="whether autograd counts this as a write depends on the device and on the calling op",
    hint="call resolve_conj() or resolve_neg() first, or use torch.no_grad()",
    example="""
def f(x): return torch._neg_view(x[2:]).swapaxes_(0, 1)
torch.inference_mode()(capture)(f, (torch.ones(3, 3),))
""",
)
DATA_DEPENDENT_STRIDES = Refusal(
    UnsupportedMutationError,
    what="{op} depends on the order of its tensor's dimensions in memory, which is data-dependent",
    why="whether dimension {outer} or {inner} has the larger stride depends on data-dependent sizes",
    hint="call .contiguous() on the tensor first, or state what you know about the sizes with torch._check",
    example="""
def f(n): return torch.rand_like(torch.zeros(40).as_strided((3, 4), (n.item(), 2)))
capture(f, (torch.tensor(2),), on_data="raise")
""",
)
