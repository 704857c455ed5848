"""The rows of the JAX backend, by families of operators; ``lowering`` is the registry, and the decorator that adds one.

Invariant: a row is one operator of the core ATen set, or one that torch has no decomposition for. What is not here is
decomposed by torch's decompositions.
"""

from functionalize.backends.jax.lowerings import (
    activations,
    attention,
    control,
    convolutions,
    elementwise,
    factories,
    factorizations,
    indexing,
    matrices,
    numbers,
    pooling,
    randomness,
    recurrent,
    reductions,
    shapes,
    sorting,
)
from functionalize.backends.jax.lowerings.registry import lowering as lowering

FAMILIES = (
    activations,
    attention,
    control,
    convolutions,
    elementwise,
    factories,
    factorizations,
    indexing,
    matrices,
    numbers,
    pooling,
    randomness,
    recurrent,
    reductions,
    shapes,
    sorting,
)
