"""Mixtures of experts on several ranks, for :mod:`tests.support.ranks`: data decides how many tokens each rank gets.

Each is written as token dispatchers are: tokens are sorted by their expert, counts are exchanged, and the counts are
the splits of a second exchange; experts compute on a number of rows that data decides, and the tokens travel back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.distributed.nn.functional as nn_functional
from torch import Tensor, nn

from tests.support.ranks import Makes, Program

functional: Any = torch.distributed._functional_collectives  # its stubs want names of groups

TOKENS, WIDTH, LOCAL = 6, 4, 2  # tokens on a rank, their size, experts on a rank


class Exchange(torch.autograd.Function):
    """`all_to_all_single`, whose backward sends gradients back."""

    @staticmethod
    def forward(ctx: Any, group: Any, x: Tensor, received: list[int] | None, sent: list[int] | None) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        x = x.contiguous()
        out = torch.empty_like(x) if received is None else x.new_empty([sum(received), *x.size()[1:]])
        dist.all_to_all_single(out, x, output_split_sizes=received, input_split_sizes=sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, exchange(ctx.group, gradients[0], ctx.sent, ctx.received), None, None


exchange: Any = Exchange.apply


class Experts(nn.Module):
    """Experts of a rank, and the router of all; a subclass sends tokens to them and back."""

    def __init__(self, rank: int, world: int, group: Any) -> None:
        super().__init__()
        self.rank, self.world, self.group = rank, world, group
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, LOCAL * world, bias=False)
        torch.manual_seed(rank + 1)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LOCAL))

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of each token, and its expert."""
        weights, choice = self.router(x).softmax(-1).max(-1)
        return weights, choice

    def counts(self, choice: Tensor) -> Tensor:
        """How many tokens go to each expert of all ranks."""
        return torch.bincount(choice.flatten(), minlength=LOCAL * self.world)

    def computed(self, x: Tensor, counts: list[int]) -> Tensor:
        """What experts make of rows that are sorted by expert."""
        return torch.cat([expert(part) for expert, part in zip(self.experts, x.split(counts), strict=True)])


class ByRank(Experts):
    """Rows that arrive are sorted by rank, then by expert: their chunks are sorted by expert, and back."""

    def by_rank(self, counts: Tensor) -> list[int]:
        """How many tokens each rank gets."""
        return counts.view(self.world, LOCAL).sum(1).tolist()

    def exchanged(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return exchange(self.group, x, received, sent)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.routed(x)
        order = choice.argsort(stable=True)
        counts = self.counts(choice)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = self.by_rank(counts), self.by_rank(arriving)
        table = arriving.view(self.world, LOCAL)
        rows = self.exchanged(x[order], received, sent)
        chunks = rows.split(table.flatten().tolist())
        by_expert = [chunks[r * LOCAL + e] for e in range(LOCAL) for r in range(self.world)]
        rows = self.computed(torch.cat(by_expert), table.sum(0).tolist())
        chunks = rows.split(table.t().flatten().tolist())
        rows = torch.cat([chunks[e * self.world + r] for r in range(self.world) for e in range(LOCAL)])
        back = self.exchanged(rows, sent, received)
        return torch.zeros_like(x).index_copy(0, order, back) * weights.unsqueeze(1)


class InPlace(ByRank):
    """No gradients: exchanges write to tensors of the program."""

    def exchanged(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        out = x.new_empty(sum(received), WIDTH)
        dist.all_to_all_single(out, x, received, sent, group=self.group)
        return out

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


class Later(InPlace):
    """Asynchronous exchanges, beside a shared expert."""

    def exchanged(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        out = x.new_empty(sum(received), WIDTH)
        work = dist.all_to_all_single(out, x, received, sent, group=self.group, async_op=True)
        shared = x * 2
        work.wait()
        return out + shared.sum()


class Functional(ByRank):
    """Functional collectives, which have gradients."""

    def exchanged(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return functional.all_to_all_single_autograd(x, received, sent, self.group)  # type: ignore[no-any-return]


class Listed(Functional):
    """The length of the list of counts, which `bincount` decides, is a decision."""

    def by_rank(self, counts: Tensor) -> list[int]:
        numbers = counts.tolist()
        return [sum(numbers[rank * LOCAL : (rank + 1) * LOCAL]) for rank in range(self.world)]


class Differentiable(ByRank):
    """Those of ``torch.distributed.nn``."""

    def exchanged(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        out = x.new_empty(sum(received), WIDTH)
        return nn_functional.all_to_all_single(out, x, received, sent, group=self.group)  # type: ignore[no-any-return]


class TwoOfAll(Experts):
    """Each token goes to two experts; masks choose the rows, and their results are added up by position."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        choice = scores.topk(2, dim=-1).indices
        mapping = torch.zeros_like(scores, dtype=torch.bool).scatter(1, choice, True).t().contiguous()
        tokens = torch.arange(x.size(0)).expand(mapping.size(0), -1).masked_select(mapping)
        kept = scores.t().contiguous().masked_select(mapping)
        counts = mapping.sum(1)
        everywhere = [torch.empty_like(counts) for _ in range(self.world)]
        dist.all_gather(everywhere, counts, group=self.group)
        table = torch.stack(everywhere)[:, self.rank * LOCAL : (self.rank + 1) * LOCAL].contiguous()
        sent, received = counts.view(self.world, LOCAL).sum(1).tolist(), table.sum(1).tolist()
        rows = exchange(self.group, x[tokens], received, sent)
        experts = torch.arange(LOCAL).repeat(self.world).repeat_interleave(table.flatten())
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            places = (experts == number).nonzero().squeeze(1)
            out = out.index_add(0, places, expert(rows[places]))
        back = exchange(self.group, out, sent, received)
        return torch.zeros_like(x).index_add(0, tokens, back * kept.unsqueeze(1))


class Padded(Experts):
    """The largest count of all ranks is the capacity of each expert: even exchanges of a size that data decides."""

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.routed(x)
        capacity = self.counts(choice).max()
        dist.all_reduce(capacity, op=dist.ReduceOp.MAX, group=self.group)
        most = int(capacity.item())
        mask = nn.functional.one_hot(choice, LOCAL * self.world)
        place = ((mask.cumsum(0) - 1) * mask).sum(1)
        slots = torch.zeros(LOCAL * self.world * most, WIDTH).index_copy(0, choice * most + place, x)
        rows = exchange(self.group, slots, None, None).view(self.world, LOCAL, most, WIDTH)
        parts = [expert(rows[:, number]) for number, expert in enumerate(self.experts)]
        back: Tensor = exchange(self.group, torch.stack(parts, 1).view(-1, WIDTH), None, None)
        return back[choice * most + place] * weights.unsqueeze(1)


class Skipping(ByRank):
    """An expert without tokens is left out: a decision, which differs by rank and call.

    If all are, one runs on no rows: without it the backward would communicate on other ranks alone.
    """

    def computed(self, x: Tensor, counts: list[int]) -> Tensor:
        parts = x.split(counts)
        made = [expert(part) for expert, part in zip(self.experts, parts, strict=True) if part.size(0) > 0]
        return torch.cat(made) if made else self.experts[0](x)


class Step(nn.Module):
    """A training step of a mixture, with its backward inside."""

    def __init__(self, mixture: Experts) -> None:
        super().__init__()
        self.mixture = mixture
        self.optimizer = torch.optim.SGD(mixture.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (x + self.mixture(x)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]


class Loss(Step):
    """The loss of a mixture, whose gradients are taken outside."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.mixture(x)).square().mean()  # type: ignore[no-any-return]


def tokens(rank: int, call: int) -> tuple[Tensor]:
    """Tokens that are routed otherwise on each rank in each call: in some calls one rank gets all, or all but one."""
    torch.manual_seed(call)
    alike = 5 * torch.randn(WIDTH).expand(TOKENS, WIDTH)
    torch.manual_seed(100 * rank + call)
    x = torch.randn(TOKENS, WIDTH)
    if call // 2 % 3 == 1:
        x = alike + 0.1 * x
        if call // 2 % 6 == 1 and rank == 0:
            x[0] = -x[0]
    return (x,)


def _program(of: Callable[..., nn.Module], backward: bool, rank: int, world: int, group: Any) -> Program:
    return Program(of(rank, world, group), partial(tokens, rank), calls=24, backward=backward)


def _step(cls: type[Experts], *where: Any) -> nn.Module:
    return Step(cls(*where))


def _loss(cls: type[Experts], *where: Any) -> nn.Module:
    return Loss(cls(*where))


EXPERTS: dict[str, Makes] = {
    "in place": partial(_program, InPlace, False),
    "later": partial(_program, Later, False),
    "a step": partial(_program, partial(_step, ByRank), False),
    "a step of functional collectives": partial(_program, partial(_step, Functional), False),
    "gradients outside": partial(_program, partial(_loss, ByRank), True),
    "gradients of functional collectives outside": partial(_program, partial(_loss, Functional), True),
    "gradients outside, beside a decision": partial(_program, partial(_loss, Listed), True),
    "gradients of torch.distributed.nn outside": partial(_program, partial(_loss, Differentiable), True),
    "two of all": partial(_program, partial(_step, TwoOfAll), False),
    "padded": partial(_program, partial(_step, Padded), False),
    "skipping": partial(_program, partial(_step, Skipping), False),
}
