"""The table of JAX lowerings itself."""

from functionalize.backends.registry import Lowerings

lowering = Lowerings("jax")
