"""Ranks that capture a program together agree on what they communicate, through the store of the process groups.

In: what a rank is about to communicate for a decision, or what its capture has come to. Out: nothing, or an error that
all ranks raise. Invariant: the groups of the program are not used, so that a rank that does not come leaves no
collective without its partner. Limits: ranks wait some seconds; who has captured nothing by then goes its own way.
"""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
from torch.fx import Graph, Node

from functionalize._torch.distributed.collectives import Meeting, is_alone, ranks_of
from functionalize._torch.distributed.communication import group_name_of
from functionalize.errors import in_words
from functionalize.ops.calls import declared
from functionalize.ops.collectives import collective, starts
from functionalize.refusals.values import COLLECTIVE_BESIDE_BRANCH, DISAGREE
from functionalize.runtime.communication import CallLog

_SECONDS = 10.0  # until ranks compare captures
_FOR_DECISIONS = 7.0  # less, so that ranks that compare captures learn that one is refused
_PAIRS = ("send", "receive")  # which have another order on each rank


def agree_to_communicate(capture: str, node: Node, position: int) -> None:
    """Return once all ranks of a group are about to run this collective, for a decision of this capture.

    Raises:
        UnsupportedProgramError: another rank does not come, or comes with another collective; or a node sends to a
            single rank, which may be about to do anything.
    """
    op: Any = node.target
    collective, group = _kind(node), _group_name(node)
    if collective in _PAIRS or group is None:
        reason = "a branch depends on it, and whether its partner captures at the same time is unknown"
        raise COLLECTIVE_BESIDE_BRANCH.error(op=op.name(), reason=reason)
    if is_alone(group):
        return
    meeting = Meeting(group, f"{capture}/{position}")
    meeting.leave(collective)
    texts = [meeting.text(rank, _FOR_DECISIONS) for rank in range(meeting.size)]
    absent = [rank for rank, text in enumerate(texts) if text is None]
    if not meeting.settle(not absent):
        came = f"rank {absent[0]} did not come" if absent else "another rank did not wait"
        raise DISAGREE.error(group=group, reason=f"{came} to {collective}, on whose result a branch depends")
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise DISAGREE.error(group=group, reason=f"rank 0 runs {texts[0]}, rank {rank} {text}")


def agree_on_capture(log: CallLog, graph: Graph | None, error: Exception | None = None) -> None:
    """Compare what the captures of a program communicate, on all ranks of its groups; ``error``: why this one failed.

    Raises:
        UnsupportedProgramError: a rank was refused, or communicates in another order.
    """
    if log.capture is None or not (dist.is_available() and dist.is_initialized()) or is_alone():
        return
    orders = {} if graph is None else _orders(graph)
    meeting = Meeting(dist.group.WORLD.group_name, log.capture)  # type: ignore[union-attr]
    refused = None if error is None else str(error).partition("\n")[0] if in_words(error) else type(error).__name__
    meeting.leave(json.dumps({"refused": refused, "orders": orders}))
    for group, order in orders.items():
        for rank in ranks_of(group):
            text = meeting.text(rank, _SECONDS)
            if text is None:
                continue
            other = json.loads(text)
            if other["refused"] is not None:
                raise DISAGREE.error(group=group, reason=f"on rank {rank} it is refused: {other['refused']}")
            theirs = other["orders"].get(group, [])
            if theirs != order:
                reason = f"rank {meeting.rank} runs {_in_words(order)}; rank {rank} runs {_in_words(theirs)}"
                raise DISAGREE.error(group=group, reason=reason)


def _orders(graph: Graph) -> dict[str, list[str]]:
    """The kinds of the collectives of a graph, in order, by their group."""
    orders: dict[str, list[str]] = {}
    for node in graph.nodes:
        group = _group_name(node) if node.op == "call_function" and starts(node.target) else None
        if group is not None and _kind(node) not in _PAIRS:
            orders.setdefault(group, []).append(_kind(node))
    return orders


def _kind(node: Node) -> str:
    row = collective(node.target)
    return "" if row is None else row.kind


def _group_name(node: Node) -> str | None:
    return group_name_of(node) if "group_name" in declared(node.target) else None


def _in_words(order: list[str]) -> str:
    return ", ".join(order) or "nothing"
