"""Captured programs as functions of JAX arrays. Importing this needs jax (the extra ``jax``).

>>> from functionalize.backends.jax import lowering
"""

import importlib.util

if importlib.util.find_spec("jax") is None:
    raise ModuleNotFoundError("JAX programs need the package jax: pip install 'functionalize[jax]'", name="jax")

from functionalize.backends.arrays.program import Written as Written
from functionalize.backends.jax.jaxify import JaxFunction as JaxFunction
from functionalize.backends.jax.jaxify import jaxify as jaxify
from functionalize.backends.jax.lowerings import lowering as lowering
from functionalize.backends.jax.program import JaxProgram as JaxProgram
from functionalize.backends.jax.program import to_jax as to_jax
from functionalize.backends.jax.stablehlo import StableHloProgram as StableHloProgram
from functionalize.backends.jax.stablehlo import load as load
from functionalize.backends.jax.stablehlo import save as save
from functionalize.backends.jax.stablehlo import write_stablehlo as write_stablehlo
from functionalize.backends.jax.values import from_torch as from_torch
from functionalize.backends.jax.values import to_torch as to_torch
