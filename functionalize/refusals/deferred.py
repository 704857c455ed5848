"""Refusals of deferred constructions: what `deferred_init` cannot record, and what cannot be materialized."""

from __future__ import annotations

from functionalize.errors import DeferredError, NotDeferredError
from functionalize.refusals.refusal import Refusal

DEFERRED_FOR_MISSING_DEVICE = Refusal(
    DeferredError,
    what="a deferred tensor was made for the device {device}",
    why="this machine has no such device",
    hint='name a device that it has: materialize_module(module, device="cpu")',
    example="""
layer = deferred_init(torch.nn.Linear, 2, 2, device="cuda:77")
materialize_module(layer)
""",
)
OUTSIDE_TENSOR_CHANGED = Refusal(
    DeferredError,
    what="{tensor} was changed after a deferred construction read it",
    why="the materialized tensors would differ from those that the construction computed",
    hint="materialize before you change the tensor, or pass a copy (`.clone()`) to the construction",
    example="""
scale = torch.ones(2)
weight = deferred_init(lambda: scale * 2)
scale.zero_()
materialize_tensor(weight)
""",
)
OUTSIDE_TENSOR_WRITTEN = Refusal(
    DeferredError,
    what="{op} writes to a tensor of size {size} that was made outside the deferred construction",
    why="a deferred construction runs later, perhaps more than once, so it must not change tensors outside it",
    hint="write to a copy (`.clone()`), or make the tensor inside the construction",
    example="""
total = torch.zeros(2)
deferred_init(lambda: total.add_(torch.ones(2)))
""",
)
MATERIALIZED_TENSOR_WRITTEN = Refusal(
    DeferredError,
    what="{op} writes to a deferred tensor of size {size} that is already materialized",
    why="the real tensor would not see the write",
    hint="write to the real tensor, which materialize_tensor returns",
    example="""
weight = deferred_init(torch.ones, 2)
materialize_tensor(weight)
weight.add_(1)
""",
)
MATERIALIZED_INSIDE = Refusal(
    DeferredError,
    what="a tensor is materialized inside the construction that makes it",
    why="what the construction does to it afterwards would be lost",
    hint="materialize after deferred_init has returned; to read values, use tolist(), item() or numpy()",
    example="deferred_init(lambda: materialize_tensor(torch.ones(2)))",
)
DEFERRED_LAYOUT = Refusal(
    DeferredError,
    what="cannot materialize a tensor of layout {layout} and size {size}",
    why="only strided tensors can be deferred",
    hint="keep the dense tensor, and convert it after it is materialized",
    example="materialize_tensor(deferred_init(lambda: torch.eye(2).to_sparse()))",
)
NOT_DEFERRED = Refusal(
    NotDeferredError,
    what="cannot materialize a fake tensor of size {size}",
    why="it was not made inside deferred_init, so how to compute it was not recorded",
    hint="make it inside deferred_init(function, ...)",
    example="""
with fake_mode():
    weight = torch.ones(2)
materialize_tensor(weight)
""",
)
VIEW_OF_CONVERTED_DTYPE = Refusal(
    DeferredError,
    what="a {dtype} tensor that also has a view of another dtype is to be converted to {to}",
    why="conversion changes the bytes that the view reads",
    hint="materialize without `dtype`, and convert the tensors afterwards",
    example="""
class Packed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("bits", self.weight.detach().view(torch.int32))

materialize_module(deferred_init(Packed), dtype=torch.float64)
""",
)
NO_META_KERNEL = Refusal(
    DeferredError,
    what="{op} on deferred tensors",
    why="the operator has no meta kernel, so the shapes and dtypes of its results are unknown until it runs",
    hint="register one with torch.library.register_fake, or call the operator outside deferred_init and pass its "
    "result",
    example="""
half = torch.library.custom_op("mine::half", lambda x: x / 2, mutates_args=(), schema="(Tensor x) -> Tensor")
deferred_init(lambda: half(torch.ones(2)))
""",
)
DEFERRED_MEMORY_READ = Refusal(
    DeferredError,
    what="the construction reads the memory of a deferred tensor",
    why="a deferred tensor has no memory yet, and the read does not go through the dispatcher, where it would be "
    "computed",
    hint="read values with tolist(), item() or numpy(), which compute them; read memory after the tensor is "
    "materialized",
    example="deferred_init(lambda: torch.ones(2).untyped_storage()[0])",
)
DEFERRED_ADDRESS_READ = Refusal(
    DeferredError,
    what="the construction reads the address of a deferred tensor (data_ptr)",
    why="a deferred tensor has no memory yet",
    hint="read it after the tensor is materialized; to learn whether two tensors share memory, compare "
    "untyped_storage()._cdata",
    example="deferred_init(lambda: torch.ones(2).data_ptr())",
)
DEFERRED_INSIDE_TRACE = Refusal(
    DeferredError,
    what="deferred_init, or an operation on a deferred tensor, inside a traced function",
    why="the tracer records the operators itself, and replaces tensors by its own",
    hint="construct the module outside, and trace the function that runs it",
    example="make_fx(lambda x: x + deferred_init(torch.ones, 2))(torch.ones(2))",
)
