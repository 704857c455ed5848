"""The table of JAX lowerings itself."""

from functionalize.backends.arrays.registry import Lowerings

lowering = Lowerings("jax")
