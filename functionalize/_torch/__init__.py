"""The only door to private torch symbols. Each is imported in here with the reason why no public one serves.

Exports what most modules need; what loads sympy or Dynamo is imported from its module. Invariant: nothing here knows
of bases, views or rules. Limits: written against torch 2.13 and 2.15.
"""

from torch.utils import _pytree as pytree  # torch has no public pytree

from functionalize._torch.dispatch import *
from functionalize._torch.fakes import *
from functionalize._torch.symbols.sizes import *
from functionalize._torch.symbols.traced_symbols import *
from functionalize._torch.symbols.tracing import *
from functionalize._torch.tensors import *
