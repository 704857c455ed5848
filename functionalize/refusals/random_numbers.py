"""Refusals of random numbers: generators that a program seeds, sets or reads, and draws that a call cannot repeat."""

from __future__ import annotations

from functionalize.errors import UnsupportedMutationError, UnsupportedProgramError
from functionalize.refusals.refusal import Refusal

_ONCE = "this would happen once, at the capture, and not at each call"
_SEED_BEFORE = (
    "seed before the program is called; or make a generator inside it (torch.Generator().manual_seed(seed)), and pass "
    "it to the operators that draw"
)
_ONLY_TORCH = "a call runs only torch operators: what the capture wrote or drew once would be the same in all calls"

GENERATOR_SET = Refusal(
    UnsupportedProgramError,
    what="the program sets the state of a torch generator",
    why=_ONCE,
    hint=_SEED_BEFORE,
    example="""
def f(x): torch.set_rng_state(torch.roll(torch.get_rng_state(), 8))
capture(f, (torch.ones(2),))
""",
)
GENERATOR_SEEDED = Refusal(
    UnsupportedProgramError,
    what="the program seeds torch's generator",
    why=_ONCE,
    hint=_SEED_BEFORE,
    example="""
def f(x): return x * torch.manual_seed(0).initial_seed()
capture(f, (torch.ones(2),))
""",
)
GENERATOR_SEEDED_AT_RANDOM = Refusal(
    UnsupportedProgramError,
    what="the program seeds torch's generator non-deterministically",
    why=_ONCE,
    hint=_SEED_BEFORE,
    example="""
def f(x): return x * torch.seed()
capture(f, (torch.ones(2),))
""",
)
DRAWN_AFTER_RESTORE = Refusal(
    UnsupportedProgramError,
    what="the program draws from torch's generator after it has restored its state",
    why=_ONCE,
    hint=_SEED_BEFORE,
    no_example="it needs a checkpointed region that draws more numbers when it is recomputed",
)
SEED_READ = Refusal(
    UnsupportedProgramError,
    what="the program reads the seed of torch's generator",
    why="the seed would be a constant of the captured program",
    hint="pass the seed as an argument",
    example="""
def f(x): return x * torch.initial_seed()
capture(f, (torch.ones(2),))
""",
)
GENERATOR_READ = Refusal(
    UnsupportedProgramError,
    what="the program reads the state of a torch generator",
    why="operators draw nothing while they are recorded, so the state is not the one that a call would read",
    hint="read it before or after the program is called",
    example="""
def f(x): return torch.get_rng_state()
capture(f, (torch.ones(2),))
""",
)
GENERATOR_OUTSIDE_STATE = Refusal(
    UnsupportedProgramError,
    what="the program draws random numbers from a generator that is not part of its state and stays alive",
    why="a call could not set the state of that generator afterwards",
    hint="pass the generator as an argument, or keep it in a variable or an attribute that the program reads",
    example="""
import threading
kept = threading.local()
kept.generator = torch.Generator()
capture(lambda x: x + torch.rand(2, generator=kept.generator), (torch.ones(2),))
""",
)
DRAWN_OUTSIDE_TORCH = Refusal(
    UnsupportedProgramError,
    what="the program draws numbers from {source}",
    why=_ONLY_TORCH,
    hint="draw with torch: torch.rand(()).item(); or draw before the call, and pass the number as a tensor",
    example="""
import random
capture(lambda x: x * random.random(), (torch.ones(2),))
""",
)
DRAWN_IN_UNSAVED_REGION = Refusal(
    UnsupportedProgramError,
    what="{op} in a checkpointed region with preserve_rng_state=False",
    why="eager draws new random numbers when it recomputes the region, but under `torch.compile` it draws the same "
    "ones",
    hint="remove preserve_rng_state=False, draw outside the region, or use `functionalize.capture`",
    no_example="torch.compile puts it into an error of its own",
)
DRAWN_DIFFERENTLY_AGAIN = Refusal(
    UnsupportedProgramError,
    what="{op} in a checkpointed region that is recomputed",
    why="from the same generator state, the recomputation draws other random numbers than the first run: the operator "
    "or its inputs have changed",
    hint="draw outside the region and pass the numbers to it, or change the inputs of the draw outside the region",
    example="""
from torch.utils.checkpoint import checkpoint
count = torch.zeros(2)
region = lambda x: x.sin() * torch.bernoulli(torch.sigmoid(count.add_(1)))
def f(x): return torch.autograd.grad(checkpoint(region, x, use_reentrant=False).cos().sum(), x)
capture(f, (torch.ones(2, requires_grad=True),))
""",
)
DRAWN_IN_BACKWARD = Refusal(
    UnsupportedMutationError,
    what="{op} in a backward that is differentiated",
    why="the next derivative runs that backward again, and would draw other random numbers",
    hint="draw the random numbers in the forward, or compute the gradients inside the captured program",
    example="""
class Noisy(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, g: g * torch.rand(2))
x = torch.ones(2, requires_grad=True)
scale = torch.ones(2, requires_grad=True)
(first,) = torch.autograd.grad(capture(Noisy.apply, (x,))(x), x, scale, create_graph=True)
first.sum().backward()
""",
)
