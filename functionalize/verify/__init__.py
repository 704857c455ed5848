"""Checks for users and tests: is a graph free of mutations, does a transformed function equal the eager one?"""

from functionalize.verify.functional import assert_functional, source_line
from functionalize.verify.observation import assert_equivalent, clone_inputs

__all__ = ["assert_equivalent", "assert_functional", "clone_inputs", "source_line"]
