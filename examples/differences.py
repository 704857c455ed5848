"""Small programs on which `functionalize` and `torch.func.functionalize` differ; prints the README's table.

Each is traced in fake mode with mutations and views to be removed, by both. The table says whether tracing
raises, whether the graph does to outputs and inputs what eager does, and what is left beside its write-backs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import functionalize
from functionalize.errors import NotEquivalentError
from functionalize.verify import assert_equivalent
from functionalize.verify.observation import clone_inputs

aten = torch.ops.aten
Transform = Callable[..., Callable[..., Any]]


@dataclass(frozen=True)
class Program:
    """What it does in a reader's words, the function, and its inputs."""

    title: str
    run: Callable[..., Any]
    inputs: tuple[Any, ...]


def write_into_copy(x: Tensor) -> Tensor:
    """`contiguous` of a transposed tensor is a copy: `x` must not change."""
    return x.t().contiguous().add_(1)


def training_step(weight: Tensor, x: Tensor) -> Tensor:
    loss = (x @ weight).square().sum()
    (gradient,) = torch.autograd.grad(loss, [weight])
    with torch.no_grad():
        weight.sub_(gradient, alpha=0.1)
    return loss.detach()


def fused_adamw(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, steps: Tensor) -> Tensor:
    """Without amsgrad one of the lists that the op writes is empty."""
    rates: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    torch._fused_adamw_([weight], [gradient], [mean], [square], [], [steps], **rates, amsgrad=False, maximize=False)
    return weight.sum()


def write_through_views(x: Tensor) -> Tensor:
    """Five writes through the end of a chain of 200 views."""
    view = x
    for depth in range(200):
        view = view.view(2, -1) if depth % 2 == 0 else view.view(-1)
    for _ in range(5):
        view.add_(1)
    return x.sum()


def programs() -> list[Program]:
    r = torch.randn
    statistics = (torch.zeros(3), torch.ones(3))
    adamw = (r(3), r(3), r(3), r(3).abs(), torch.tensor(1.0))
    return [
        Program("`x.t().contiguous().add_(1)`", write_into_copy, (r(3, 4),)),
        Program("`torch.autograd.grad` and an update inside", training_step, (r(3, 2).requires_grad_(), r(4, 3))),
        Program("`torch.diff(x, out=out)`, a composite `out=`", lambda x, o: torch.diff(x, out=o), (r(6), r(5))),
        Program("fused AdamW without amsgrad", fused_adamw, adamw),
        Program(
            "`batch_norm` in training",
            lambda x, m, v: F.batch_norm(x, m, v, training=True),
            (r(4, 3), *statistics),
        ),
        Program(
            "`torch.einsum('bij,jk->bik', x, w)`",
            lambda x, w: torch.einsum("bij,jk->bik", x, w),
            (r(2, 3, 4), r(4, 5)),
        ),
        Program(
            "`scaled_dot_product_attention` with dropout",
            lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
            (r(1, 2, 4, 4),),
        ),
        Program("`x.quantile(0.3)`", lambda x: x.quantile(0.3), (r(9),)),
        Program("circular `pad`", lambda x: F.pad(x, (1, 1), mode="circular"), (r(1, 2, 5),)),
        Program(
            "`lstm_cell`",
            lambda x, h, c, *w: torch.lstm_cell(x, [h, c], *w),
            (r(2, 3), r(2, 4), r(2, 4), r(16, 3), r(16, 4)),
        ),
        Program("`matmul` of 3-D by 2-D", lambda x, w: x @ w, (r(2, 3, 4), r(4, 5))),
        Program("200 views, 5 writes through the last", write_through_views, (r(8),)),
    ]


def left_over(graph: Graph) -> tuple[int, int, int]:
    """How many nodes there are, how many of them write (write-backs aside), and how many are views."""
    nodes = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return len(nodes), sum(map(writes, nodes)), sum(map(is_view, nodes))


def is_view(node: Node) -> bool:
    op: Any = node.target
    return bool(op.is_view and not op._schema.is_mutable)


def writes(node: Node) -> bool:
    op: Any = node.target
    target = node.args[0] if op is aten.copy_.default else None
    if isinstance(target, Node) and target.op == "placeholder":
        return False
    # native_batch_norm writes its running statistics, which its schema denies
    return op._schema.is_mutable or op is aten.native_batch_norm.default


def outcome(transform: Transform, program: Program) -> str:
    """What becomes of the program, in a few words; for a right one the number of nodes."""
    torch.manual_seed(0)
    try:
        graph = make_fx(transform(program.run, remove="mutations_and_views"), tracing_mode="fake")(
            *clone_inputs(program.inputs)
        )
    except RuntimeError as error:
        return "refused" + (" (internal assert)" if "INTERNAL ASSERT" in str(error) else "")
    try:
        # no_grad: gradients are nodes of the graph, and its write-backs may go to leaves that require grad
        assert_equivalent(program.run, *program.inputs, transform=lambda _: torch.no_grad()(graph), aliasing=False)
    except NotEquivalentError:
        return "**silently wrong**"
    nodes, writing, views = left_over(graph.graph)
    left = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((writing, "write"), (views, "view")) if n]
    return f"leaves {' and '.join(left)}" if left else f"right: {nodes} nodes"


def main() -> None:
    torch.manual_seed(0)
    print("| program | `torch.func.functionalize` | `functionalize` |\n|---|---|---|")
    for program in programs():
        theirs, ours = (outcome(t, program) for t in (torch.func.functionalize, functionalize))
        if not (theirs.startswith("right") and ours.startswith("right")):
            ours = ours.partition(":")[0]  # the number of nodes says nothing beside a failure
        print(f"| {program.title} | {theirs} | {ours} |")


if __name__ == "__main__":
    main()
