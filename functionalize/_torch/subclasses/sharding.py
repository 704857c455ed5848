"""DTensor's plans: how each operator's results are sharded, kept by a hash of the operator's arguments.

In: what torch asks its planner. Out: what the planner answers. Guarantees: in an operator on lists, as an optimizer
calls, tensors of equal specifications are planned once; torch plans each of them, in time quadratic in their number.
Invariant: once a capture is over, no plan holds a symbol of it.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PLANS_IN = "torch.distributed.tensor."  # the modules whose code hashes arguments for that
PLANNER = "_propagate_op_sharding_dispatch_slow_path"  # C++ calls it by this name where it has no plan
_ON_LISTS = ("aten::_foreach_", "aten::_fused_")


def forget_plans() -> None:
    """Drop all plans; torch makes them again when they are needed."""
    if "torch.distributed.tensor" in sys.modules:
        debug: Any = importlib.import_module("torch.distributed.tensor.debug")
        debug._clear_sharding_prop_cache()  # the public module has no public name for it


def dispatcher() -> type | None:
    """The class whose planner torch calls; None if the program has no DTensors."""
    module: Any = sys.modules.get("torch.distributed.tensor._dispatch")
    return None if module is None else module.OpDispatcher


def planning_once(plan: Callable[..., Any]) -> Callable[..., Any]:
    """The planner, asked once for all elements of lists that are equal."""

    def planned(own: Any, op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
        lists = _Lists.of(info.schema)
        if lists is None:
            return plan(own, op, args, kwargs, info, try_cache)
        asked = dataclasses.replace(info.schema, args_schema=lists.shortened(), _comparison_key=None)
        made = plan(own, op, args, kwargs, dataclasses.replace(info, schema=asked), try_cache)
        return lists.of_all(made) if dataclasses.is_dataclass(made) else made  # results, if torch took the op apart

    return planned


def is_ordered(cls: type, context: Any) -> bool:
    """Whether ``__tensor_flatten__`` gives an order of shards with strided ones, which its inverse does not take."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None or not issubclass(cls, module.DTensor):
        return False
    placements, _, order, *_ = context
    return order is not None and any(type(placement).__name__ == "_StridedShard" for placement in placements)


def in_order(unflatten: Callable[..., Any], inner: Any, context: Any, *where: Any) -> Any:
    """A DTensor with such an order, which a view leaves; ``where``: its size and its strides."""
    made = unflatten(inner, (*context[:2], None, *context[3:]), *where)
    made._spec.use_strided_shard_as_shard_order, made._spec.shard_order = False, context[2]
    return made


@dataclass(frozen=True)
class _Lists:
    """The lists among the arguments of an operator.

    ``firsts``: the positions of elements that no earlier one is equal to; ``places``: of each element, which of these
    it is equal to.
    """

    schema: Any
    lists: Mapping[int, Any]  # by their positions
    firsts: Sequence[int]
    places: Sequence[int]

    @classmethod
    def of(cls, schema: Any) -> _Lists | None:
        """Those of an operator whose results depend on elements of one position alone; None if all elements differ."""
        if not schema.op.name().startswith(_ON_LISTS):
            return None
        lists: dict[int, Any] = {
            n: arg for n, arg in enumerate(schema.args_schema) if isinstance(arg, (list, tuple)) and arg
        }
        if not any(_is_tensor(elements[0]) for elements in lists.values()):
            return None
        seen: dict[Any, int] = {}
        firsts, places = list[int](), list[int]()
        for position, elements in enumerate(zip(*lists.values(), strict=True)):
            if any(_has_symbols(element) for element in elements):
                return None
            place = seen.setdefault(tuple(map(_planned_by, elements)), len(seen))
            if place == len(firsts):
                firsts.append(position)
            places.append(place)
        return cls(schema, lists, firsts, places) if len(firsts) < len(places) else None

    def shortened(self) -> tuple[Any, ...]:
        """The arguments with lists of the first elements."""
        args = list(self.schema.args_schema)
        for number, elements in self.lists.items():
            args[number] = type(elements)(elements[position] for position in self.firsts)
        return tuple(args)

    def of_all(self, plan: Any) -> Any:
        """The plan of all elements, from that of the first ones."""
        results = plan.output_spec
        if isinstance(results, (list, tuple)):
            results = type(results)(results[place] for place in self.places)
        moved = plan.redistribute_schema
        if moved is not None:
            args = list(moved.args_schema)
            for number, elements in self.lists.items():
                args[number] = type(elements)(args[number][place] for place in self.places)
            moved = dataclasses.replace(moved, args_schema=tuple(args), _comparison_key=None)
        return dataclasses.replace(plan, output_spec=results, redistribute_schema=moved)


def _has_symbols(element: Any) -> bool:
    return _is_tensor(element) and not all(type(size) is int for size in element.shape)


def _planned_by(element: Any) -> Any:
    """What a plan depends on: of numbers, which may be symbols, their type."""
    return element if _is_tensor(element) else type(element)


def _is_tensor(element: Any) -> bool:
    return hasattr(element, "placements")  # as specifications of tensors do
