"""The rows of the JAX backend, by families of operators; ``lowering`` is the registry, and the decorator that adds one.

Invariant: a row is one operator of the core ATen set, or one that torch has no decomposition for. What is not here is
decomposed by torch's decompositions.
"""

from functionalize.backends.jax.lowerings import control, factories, numbers, randomness
from functionalize.backends.jax.lowerings.arithmetic import elementwise, reductions
from functionalize.backends.jax.lowerings.arrangement import indexing, shapes, sorting
from functionalize.backends.jax.lowerings.layers import activations, attention, convolutions, pooling, recurrent
from functionalize.backends.jax.lowerings.linear_algebra import factorizations, matrices
from functionalize.backends.jax.lowerings.registry import lowering as lowering
