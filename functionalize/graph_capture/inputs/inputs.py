"""The inputs of a captured program: parameters, buffers and other state that it reaches, and its arguments.

Invariant: the order is that of ``torch.export``: parameters, buffers, constants, user inputs; each state tensor once,
under the first of its names. Limits: state that no argument holds is searched for among the function's own variables
and those of functions that it calls by name. Tensors that it reached in yet another way are lifted at the end; graphs
of higher-order ops stay attributes.
"""

from __future__ import annotations

import builtins
import functools
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.nn.parameter import is_lazy

from functionalize._torch import PLAIN_TYPES, FakeTensor, buffers_of, is_persistent
from functionalize._torch.subclasses.wrappers import Wrapping, is_wrapper_class, plain_part
from functionalize._torch.symbols.tracing import track
from functionalize._torch.tensors import autograd_base
from functionalize.call_stack import Origin
from functionalize.errors import UnsupportedProgramError
from functionalize.graph_capture.inputs.hyperparameters import ChangingNumbers
from functionalize.graph_capture.inputs.state import Follower, python_guards_of
from functionalize.graph_capture.refusals.schedules import Schedules
from functionalize.python_state.refused_objects import is_opened
from functionalize.python_state.slots import Slot
from functionalize.python_state.walk import StateWalk, is_module
from functionalize.refusals.gradients import DETACHED_AND_REQUIRED
from functionalize.refusals.tensors import UNKNOWN_FAKE, WRAPPER_OF_SYMBOLS
from functionalize.runtime.arguments import CallingConvention
from functionalize.runtime.metadata import GraphInput, PartOfWrapper
from functionalize.transform.context import FunctionalizationContext

_PREFIX = {InputKind.PARAMETER: "p", InputKind.BUFFER: "b", InputKind.CONSTANT_TENSOR: "c"}  # in order


@dataclass(eq=False)
class TracedInput:
    """An input while a program is captured: what becomes its :class:`GraphInput`, and what the trace needs."""

    kind: InputKind
    name: str
    target: str | None
    value: Any  # the example: a tensor, a plain value, a MissingGradient
    slot: Slot | None = None
    argument: int | None = None
    persistent: bool | None = None
    gradient_of: TracedInput | None = None
    fake: torch.Tensor | None = None  # what the program gets in place of a tensor; a constant stays itself
    edge: Any = None  # where autograd finds its gradient, if it requires one
    version: int | None = None  # of the fake tensor, when the program began to run
    counted: int = 0  # how many writes a call reports to autograd
    base: torch.Tensor | None = None  # the example's base in autograd, where the value does not say
    root: TracedInput | None = None  # another input: autograd takes the fake for a view of it
    base_of: TracedInput | None = None  # an input that autograd takes for a view of this, which is no argument

    @property
    def given(self) -> bool:
        """Whether the program gets the input itself, and not only views of it."""
        return self.base_of is None

    @property
    def optional(self) -> bool:
        """Whether only a variable holds it: a program that does not use it does not take it as an input."""
        return self.slot is not None and not self.slot.held

    @property
    def is_tensor(self) -> bool:
        """Whether the graph gets a tensor here."""
        return isinstance(self.value, (torch.Tensor, MissingGradient))

    @property
    def known_base(self) -> torch.Tensor | None:
        """The example's base in autograd, or the example itself without a base; None unless it is a tensor."""
        return autograd_base(self.value) if self.base is None and isinstance(self.value, torch.Tensor) else self.base

    @property
    def function(self) -> Any:
        """The function of autograd that computed the input, if it requires gradients; None for a leaf."""
        return self.edge.node if isinstance(self.edge, GradientEdge) else None

    @property
    def writes(self) -> int | None:
        """How many writes autograd has seen so far; None where that is not known."""
        return None if self.version is None or self.fake is None else self.fake._version - self.version

    def frozen(self, numbers: dict[int, int]) -> GraphInput:
        """The input as calls know it; ``numbers``: the positions of inputs by identity."""
        is_tensor, of, base_of, root = self.is_tensor, self.gradient_of, self.base_of, self.root
        # Held by the program itself.
        own = self.slot is None and self.argument is None and of is None and base_of is None
        constant = self.value if (own if is_tensor else isinstance(self.value, (int, float, bool, str))) else None
        return GraphInput(
            kind=self.kind,
            name=self.name,
            target=self.target,
            is_tensor=is_tensor,
            slot=self.slot,
            argument=self.argument,
            constant=constant,
            persistent=self.persistent,
            gradient_of=None if of is None else numbers[id(of)],
            base_of=None if base_of is None else numbers[id(base_of)],
            root=None if root is None else numbers[id(root)],
            requires_grad=self._requires_grad(),
            writes=self.counted,
        )

    def _requires_grad(self) -> bool | None:
        """Whether the input requires gradients now, if the program has changed that; else None."""
        now = self.fake
        if now is None:
            return None
        before = isinstance(self.value, torch.Tensor) and self.value.requires_grad
        computed = self.edge is not None and not isinstance(self.edge, torch.Tensor)  # when the program began
        if before and now.requires_grad and now.is_leaf and computed:
            raise DETACHED_AND_REQUIRED.error(input=self.target or self.name)
        if now.requires_grad == before:
            return None
        return (
            None if now.requires_grad and not now.is_leaf else now.requires_grad
        )  # a written input requires gradients too


@dataclass(eq=False, kw_only=True)
class WrapperInput(TracedInput):
    """A wrapper: its fake is a wrapper of fake tensors. The graph takes its parts."""

    wrapping: Wrapping

    @property
    def optional(self) -> bool:
        return False

    @property
    def known_base(self) -> None:
        """Views are related by the parts."""

    def frozen(self, numbers: dict[int, int]) -> GraphInput:
        return replace(super().frozen(numbers), wrapping=self.wrapping, constant=None)

    @property
    def label(self) -> str:
        """Its quoted name."""
        return f"`{self.target or self.name}`"


@dataclass(eq=False, kw_only=True)
class PartInput(TracedInput):
    """A tensor that a wrapper holds."""

    wrapper: WrapperInput
    path: tuple[str, ...]  # the attributes that lead from the wrapper to it

    def frozen(self, numbers: dict[int, int]) -> GraphInput:
        part = PartOfWrapper(numbers[id(self.wrapper)], self.path)
        slot, argument = self.wrapper.slot, self.wrapper.argument
        return replace(super().frozen(numbers), part=part, constant=None, slot=slot, argument=argument)


@dataclass(eq=False)
class MissingGradient:
    """A gradient that a tensor does not have: a capture may ask what the program does with one."""

    of: torch.Tensor


class ProgramInputs:
    """The inputs of one program, found in the objects that it reaches and in its arguments."""

    def __init__(
        self,
        func: Callable[..., Any],
        roots: dict[str, Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        hooked: bool = False,
        suppose_gradients: bool = False,
        numbers: ChangingNumbers | None = None,
    ) -> None:
        """``hooked``: include the hooks on gradients of state, which run if the program takes gradients."""
        self._func, self._roots, self.hooked = func, roots, hooked
        self.tied: Sequence[Any] = ()  # places of lists of numbers that are in other places as well
        self.state, self.follower = self._walk()
        self.args, self.kwargs = list(args), dict(kwargs)
        self.convention = CallingConvention.of(func, self.args, self.kwargs)
        self.call = self.convention.arguments(self.args, self.kwargs)
        self.arguments = self.call.walk
        self.args = self.call.args
        self.follower.follow_arguments(self.arguments)
        self.follower.code.converts = numbers is None or numbers.converts
        self.python_guards = python_guards_of(self.state, self.follower.decisive)
        follows_steps = numbers is None or numbers.follows_steps
        self.schedules = Schedules(StateWalk() if follows_steps else self.state)
        self.schedules.leave_out(self.python_guards)
        taken: set[str] = set()
        state, user = with_parts(self._state(taken), taken), with_parts(self._user(taken), taken)
        if numbers is not None and not any(isinstance(entry.value, FakeTensor) for entry in (*state, *user)):
            state += self._numbers(numbers, taken)
        gradients = with_parts(self._gradients([*state, *user], taken, suppose_gradients), taken)
        self.inputs = [*state, *gradients, *user]

    def _walk(self) -> tuple[StateWalk, Follower]:
        state = StateWalk(of_state=True)
        for name in self._roots:
            state.walk(self._roots, name, name)
        return state, Follower(self._func, state, self.hooked)

    def walk_again(self) -> StateWalk:
        """Walk what the program can reach now, its arguments included."""
        state, follower = self._walk()
        for position in range(len(self.args)):
            state.walk(self.args, position, "")
        for name in self.kwargs:
            state.walk(self.kwargs, name, name)
        follower.follow_found()
        return state

    def _state(self, taken: set[str]) -> Iterator[TracedInput]:
        by_tensor: dict[int, TracedInput] = {}
        for slot in self.state.tensors:
            tensor = slot.get()
            if id(tensor) not in by_tensor:
                if not (slot.held or is_substituted(tensor)):
                    continue  # perhaps the program does not use it
                input_kind, persistent = _kind_of(slot, tensor)
                name = fresh_name(f"{_PREFIX[input_kind]}_{slot.path}", taken)
                made = TracedInput(input_kind, name, slot.path, tensor, slot, persistent=persistent)
                by_tensor[id(tensor)] = made
            elif (first := by_tensor[id(tensor)].slot) is not None and first is not slot:
                first.held = True  # an input in any case: whether both places hold one tensor may matter
        for input_kind in _PREFIX:
            yield from [entry for entry in by_tensor.values() if entry.kind is input_kind]

    def _gradients(self, inputs: list[TracedInput], taken: set[str], suppose: bool) -> Iterator[TracedInput]:
        """The gradients that inputs have, or could have."""
        seen: set[int] = set()
        for entry in inputs:
            leaf = is_leaf(entry.value)
            if not (leaf or has_gradient(entry.value)) or id(entry.value) in seen:
                continue
            seen.add(id(entry.value))
            gradient = entry.value.grad
            if gradient is None and suppose and leaf:
                gradient = MissingGradient(entry.value)
            if gradient is not None:
                target = f"{entry.target or entry.name}.grad"
                name = fresh_name(f"b_{target}", taken)
                yield TracedInput(InputKind.BUFFER, name, target, gradient, persistent=False, gradient_of=entry)

    def _numbers(self, numbers: ChangingNumbers, taken: set[str]) -> Iterator[TracedInput]:
        slots = numbers.take_inputs(self.state, self.python_guards, self.follower.code.all)
        self.tied = numbers.tied
        for slot in slots:
            name = fresh_name(f"{_PREFIX[InputKind.CONSTANT_TENSOR]}_{slot.path}", taken)
            yield TracedInput(InputKind.CONSTANT_TENSOR, name, slot.path, slot.get(), slot)

    def _user(self, taken: set[str]) -> Iterator[TracedInput]:
        for position, slot in enumerate(self.arguments.leaves):
            value = slot.get()
            if isinstance(value, torch.Tensor) or slot.owner is None or isinstance(slot.owner, (dict, list)):
                name = fresh_name(slot.path, taken)
                yield TracedInput(InputKind.USER_INPUT, name, None, value, argument=position)


def with_parts(entries: Iterable[TracedInput], taken: set[str], *, symbolic: bool = False) -> list[TracedInput]:
    """Inputs, with the parts of each wrapper behind it; ``symbolic``: whether sizes of wrappers may be symbols."""
    opened = list[TracedInput]()
    for entry in entries:
        if not isinstance(entry.value, torch.Tensor) or not is_opened(entry.value, f"`{entry.target or entry.name}`"):
            opened.append(entry)
        else:
            wrapper = WrapperInput(**vars(entry), wrapping=Wrapping.of(entry.value))
            if not (wrapper.wrapping.is_static or (symbolic and entry.value.layout is torch.strided)):
                raise WRAPPER_OF_SYMBOLS.error(tensor=wrapper.label, kind=wrapper.wrapping.name)
            opened += (wrapper, *_parts(wrapper, taken))
    return opened


def _parts(wrapper: WrapperInput, taken: set[str]) -> Iterator[PartInput]:
    """The tensors that a wrapper holds, as inputs."""
    for path in wrapper.wrapping.paths:
        part = plain_part(wrapper.value, path)
        is_opened(part, f"what {wrapper.label} holds")
        yield PartInput(
            kind=wrapper.kind,
            name=fresh_name(".".join((wrapper.name, *path)), taken),
            target=None if wrapper.target is None else ".".join((wrapper.target, *path)),
            value=part,
            persistent=wrapper.persistent,
            wrapper=wrapper,
            path=path,
        )


def drop_unused(inputs: list[TracedInput], graph: Graph, context: FunctionalizationContext, kept: set[int]) -> None:
    """Remove inputs that only a variable holds and that the program did not use; ``kept``: tensors by identity."""
    nodes = dict(zip(map(id, inputs), graph.find_nodes(op="placeholder"), strict=True))
    unused, dropped = context.notes.unused - kept, set[int]()
    differentiated = {id(entry.gradient_of) for entry in inputs if entry.gradient_of and nodes[id(entry)].users}
    for entry in inputs:
        fake, is_used = entry.fake, nodes[id(entry)].users or id(entry) in differentiated
        if fake is None or not entry.optional or id(fake) not in unused or is_used:
            continue
        view = context.graph.find(fake)  # perhaps of a base that it shares with another input
        if view is None or not (view.base.log or view.base.is_original(fake)):
            dropped.add(id(entry))
            context.graph.leave_out(fake)
    dropped |= {id(entry) for entry in inputs if id(entry.gradient_of) in dropped}
    for identity in dropped:
        graph.erase_node(nodes[identity])
    inputs[:] = [entry for entry in inputs if id(entry) not in dropped]


class ConstantLifter:
    """Lifts tensors that a program reached outside its inputs to inputs: before those of the user, also in the graph.

    Afterwards no attribute of the graph is a tensor. No lifted tensor is a fake tensor, unless the program was captured
    for fakes: what a capture computed is not a constant.
    """

    def __init__(self, tracer: Any, inputs: list[TracedInput], snapshot: Callable[[torch.Tensor], Any]) -> None:
        """``snapshot``: a tensor's metadata, for a node's meta."""
        self._tracer, self._inputs, self._snapshot = tracer, inputs, snapshot
        self._lifted = 0
        self._takes_fakes = any(isinstance(entry.value, FakeTensor) for entry in inputs)

    def lift_attributes(
        self, written: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Lift, and return, the tensors that the trace keeps as attributes, and those that are not in the graph yet."""
        graph, root = self._tracer.graph, self._tracer.root
        writes = {id(tensor) for tensor in written}
        missing = {id(tensor): tensor for tensor in others}
        lifted = [*missing.values()]
        for node in list(graph.find_nodes(op="get_attr")):
            value = getattr(root, str(node.target))
            if isinstance(value, torch.Tensor):
                lifted.append(value)
                written_too, user = missing.pop(id(value), None) is not None, next(iter(node.users), None)
                node.replace_all_uses_with(self.lift(value, written_too, user))
                graph.erase_node(node)
        for name, value in [*root.named_buffers(recurse=False), *list(vars(root).items())]:
            if isinstance(value, torch.Tensor):
                delattr(root, name)
        for identity, tensor in missing.items():
            self.lift(tensor, identity in writes)
        return lifted

    def lift(self, value: torch.Tensor, written: bool, user: Node | None = None) -> Node:
        """A tensor's placeholder: a buffer if it is ``written``, else a constant. ``user``: a node that uses it."""
        position = next(
            (n for n, entry in enumerate(self._inputs) if entry.kind is InputKind.USER_INPUT), len(self._inputs)
        )
        placeholders = self._tracer.graph.find_nodes(op="placeholder")
        for number, entry in enumerate(self._inputs[:position]):
            if entry.value is value:
                return placeholders[number]  # type: ignore[no-any-return]
        if isinstance(value, FakeTensor) and not self._takes_fakes:
            raise _computed_unseen(value, user)
        input_kind = InputKind.BUFFER if written else InputKind.CONSTANT_TENSOR
        name = fresh_name(f"c_lifted_tensor_{self._lifted}", {entry.name for entry in self._inputs})
        target, persistent = f"lifted_tensor_{self._lifted}", False if written else None
        made = TracedInput(
            input_kind, name, target, value, persistent=persistent, fake=value, edge=gradient_edge(value)
        )
        self._inputs.insert(position, made)
        self._lifted += 1
        after = placeholders[position - 1] if position else None
        graph = self._tracer.graph
        with graph.inserting_after(after) if after is not None else graph.inserting_before():
            node: Node = graph.placeholder(name)
        node.meta["val"] = self._snapshot(value)
        track(self._tracer, value, node)  # a backward may use it as well
        return node


def _computed_unseen(value: FakeTensor, user: Node | None) -> UnsupportedProgramError:
    origin = None if user is None else user.meta.get("stack_trace")
    used = "returned to the caller" if user is None else f"used by {user.target}"
    return UNKNOWN_FAKE.error(
        origin.location if isinstance(origin, Origin) else None, size=tuple(value.size()), dtype=value.dtype, used=used
    )


def is_substituted(tensor: torch.Tensor) -> bool:
    """Whether a capture can put a fake in a tensor's place before it knows that the program uses the tensor."""
    if type(tensor) not in PLAIN_TYPES:
        return is_wrapper_class(type(tensor))
    return not isinstance(tensor, FakeTensor) and not (tensor.is_nested or tensor.is_mkldnn or is_lazy(tensor))


def is_leaf(value: Any) -> bool:
    """Whether a value is a tensor at which autograd leaves gradients."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def has_gradient(value: Any) -> bool:
    """Whether a tensor has a gradient but does not require one: it was frozen since, or somebody put it there."""
    return isinstance(value, torch.Tensor) and not value.requires_grad and value.grad is not None


def gradient_edge(tensor: torch.Tensor) -> Any:
    """Where autograd finds the gradient of a tensor as it is now; None unless it requires one."""
    if not tensor.requires_grad:
        return None
    return tensor if tensor.is_leaf else get_gradient_edge(tensor)


def _kind_of(slot: Slot, tensor: torch.Tensor) -> tuple[InputKind, bool | None]:
    if type(tensor) is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter):
        return InputKind.PARAMETER, None
    if is_module(slot.owner):
        if slot.container is buffers_of(slot.owner):
            return InputKind.BUFFER, is_persistent(slot.owner, slot.key)
        return InputKind.CONSTANT_TENSOR, None
    return (InputKind.BUFFER, False) if slot.held else (InputKind.CONSTANT_TENSOR, None)


def fresh_name(path: str, taken: set[str]) -> str:
    """A new name for a placeholder, written as ``torch.export`` writes it."""
    name = base = _identifier(path)
    count = 0
    while name in taken or name == "self":  # `self` is the module in the code of a graph
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    if name in vars(builtins):  # FX prints such a placeholder as `input_1 = input`: no other may be called that
        taken.add(f"{name}_1")
    return name


@functools.cache
def _identifier(path: str) -> str:
    base = re.sub(r"\W", "_", path).lower() or "arg"
    return f"_{base}" if base[0].isdigit() or keyword.iskeyword(base) else base
