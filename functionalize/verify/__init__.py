"""Checks for users and tests: is a graph free of mutations, does a transformed function equal the eager one?"""

from functionalize.verify.checks import assert_equivalent, assert_functional, clone_inputs, source_line

__all__ = ["assert_equivalent", "assert_functional", "clone_inputs", "source_line"]
