"""Private parts of torch's autograd and of its partitioners.

Invariant: the partitioners, which load sympy, are imported only for gradients of a captured program.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._compile import _disable_dynamo as hidden_from_dynamo  # torch.compiler.disable loads Dynamo at once
from torch.autograd.graph import get_gradient_edge
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

from functionalize.patches import Patch, Patches

# A tensor as autograd saves it for a backward: through the hooks on saved tensors, and with a check of its version when
# it is unpacked. `save_for_backward` saves all at once, and later also checks those that are not used.
SavedTensor: Any = torch._C._autograd.SavedTensor
make_saved_tensor: Callable[[torch.Tensor, bool], Any] = torch._C._autograd._make_saved_tensor
# Whether the running backward was called with `retain_graph`.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
ENGINE = "_engine_run_backward"  # the name in `torch.autograd` of the function by which all code runs the engine
# The function by which all code sets grad mode.
SET_GRAD_MODE: Callable[[bool], None] = torch._C._set_grad_enabled
# Whether a tensor is a batch of gradients, as `torch.autograd.grad(..., is_grads_batched=True)` passes them.
is_batch_of_gradients: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def functions_noted(note: Callable[[type, tuple[Any, ...], dict[str, Any]], None]) -> Patches:
    """While entered, call ``note`` with each applied `autograd.Function` that is not ours, and its arguments."""

    def noting(before: Any) -> Any:
        def apply(function: type, *args: Any, **kwargs: Any) -> Any:
            if function.__module__.partition(".")[0] != __name__.partition(".")[0]:
                note(function, args, kwargs)
            return before.__get__(None, function)(*args, **kwargs)

        return classmethod(apply)

    return Patches([Patch(torch.autograd.Function, "apply", noting)])


def has_node_hooks(leaf: torch.Tensor) -> bool:
    """Whether Python has hooks on the node of autograd that accumulates a leaf's gradient.

    Only the dict that the handle of an added hook refers to shows them.
    """
    node: Any = get_gradient_edge(leaf).node
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *gradients: None)
        count = len(handle.hooks_dict_ref() or ())
        handle.remove()
        if count > 1:
            return True
    return False


DELAYED_ERROR = "torch::autograd::Error"  # autograd's node that raises, also for `autograd_not_implemented`
CUSTOM_BACKWARD = "GeneratedBackwardFor_"  # how the names of nodes of `torch.library.custom_op` begin


def passes_on(function: Any) -> bool:
    """Whether a function gives each gradient to the input of the same number: that of DistributedDataParallel."""
    return function.name() == "_DDPSinkBackward" and len(function.next_functions) == len(function._input_metadata)


def delayed_error(function: Any) -> str:
    """The message of the error that a node named ``DELAYED_ERROR`` raises."""
    try:
        function(None)
    except RuntimeError as error:
        return str(error)
    raise AssertionError(f"{function} raises nothing")


def without_formula(function: Any) -> str | None:
    """The message of the error that autograd's node of a custom operator without a formula raises; None for others.

    The name of the node begins with ``CUSTOM_BACKWARD``.
    """
    from torch._library.custom_ops import OPDEFS  # the operators made by `torch.library.custom_op`, by name

    name = function.name()
    for operator in OPDEFS.values():
        op = operator._opoverload
        own = f"{CUSTOM_BACKWARD}{op._namespace}_{op._opname}_{op._overloadname}Backward"
        if name == own and operator._backward_fn is None:
            what = f"Trying to backward through {op} but no autograd formula was registered."
            return f"{what} Please use register_autograd to add one."
    return None


def leave_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set a tensor's gradient, which may have got another size by now: an assignment would refuse that."""
    if gradient is None or (gradient.size() == tensor.size() and gradient.dtype == tensor.dtype):
        tensor.grad = gradient
        return
    data = gradient.data
    gradient.data = torch.empty_like(tensor, requires_grad=False)
    tensor.grad = gradient
    gradient.data = data


def checkpoint_frame() -> Any:
    """Torch's record of the checkpointed region that runs for the first time; None outside of such regions.

    The innermost pack hook of ``saved_tensors_hooks`` refers to it.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if not hooks or not getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
        return None
    function = inspect.unwrap(hooks[0])
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    return cells["frame"].cell_contents if "frame" in cells else None


def checkpoint_frames_noted(note: Callable[[Any], None]) -> Patches:
    """While entered, call ``note`` with torch's record of each checkpointed region, before the region runs."""

    def noting(before: Any) -> Any:
        def begin(frame: Any, *args: Any, **kwargs: Any) -> None:
            before(frame, *args, **kwargs)
            note(frame)

        return begin

    return Patches([Patch(_CheckpointFrame, "__init__", noting)])


def selected(run_again: Callable[..., None]) -> list[torch.Tensor]:
    """The tensors that selective checkpointing keeps of a region until ``run_again``, of its frame, runs it again."""
    cells = dict(zip(run_again.__code__.co_freevars, run_again.__closure__ or (), strict=False))
    mode = cells["recompute_context"].cell_contents if "recompute_context" in cells else None
    kept = getattr(mode, "storage", {}).values()  # of each operator, by the number of the call
    values = [value for results in kept for value in tree_leaves(list(results.values()))]
    return [value.val for value in values if isinstance(getattr(value, "val", None), torch.Tensor)]


@contextlib.contextmanager
def outside_of_the_caller() -> Iterator[None]:
    """Run without this thread's dispatch modes, ``saved_tensors_hooks`` and anomaly detection.

    Backwards run in this thread: a device's thread may wait for the end of a capture.
    """
    grad = torch.autograd
    around = _disable_current_modes(), _without_saved_tensors_hooks()
    with around[0], around[1], grad.set_detect_anomaly(False), grad.set_multithreading_enabled(False):
        yield


@contextlib.contextmanager
def _without_saved_tensors_hooks() -> Iterator[None]:
    """Run without hooks on saved tensors, also those of a checkpointed region."""
    private: Any = torch._C._autograd
    hooks = list[tuple[Any, Any]]()
    while (innermost := private._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(innermost)
        private._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            private._push_saved_tensors_default_hooks(pack, unpack)


# The number of the backward that runs in this thread; negative outside of one.
running_backward: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether autograd runs a backward."""
    return running_backward() >= 0


def in_reentrant_checkpoint() -> bool:
    """Whether ``checkpoint(use_reentrant=True)`` computes a region again."""
    if not in_backward():
        return False
    code = CheckpointFunction.backward.__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_stack(sys._getframe()))


def default_partition_fn() -> Callable[..., Any]:
    """The partition function that AOTAutograd's backends use, which saves as few bytes as it can."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def cut(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        with Patches([Patch.by(_write_no_code, torch.fx.GraphModule, "recompile")]):
            return min_cut_rematerialization_partition(joint, inputs, **options)

    return cut


def _write_no_code(module: torch.fx.GraphModule) -> None:
    """In the place of ``recompile``, for graphs that are rebuilt before anyone runs them."""


@contextlib.contextmanager
def partitioning(joint: torch.fx.GraphModule) -> Iterator[None]:
    """The context in which AOTAutograd calls partition functions; random states are saved as tensors on every device.

    Common subexpressions are not eliminated: torch's pass merges draws that it does not know to be random, and results
    of operators with several, which the program may return or write, or which may have different gradients.
    """
    from torch._functorch import config
    from torch._guards import TracingContext, detect_fake_mode, tracing

    values = [node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")]
    around = tracing(TracingContext(detect_fake_mode(values)))
    with around, config.patch(graphsafe_rng_functionalization=False, cse=False), _use_lazy_graph_module(True):
        yield


def module_without_code(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A graph as a module whose code is written when it is called; FX keeps the text of all code forever."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)
