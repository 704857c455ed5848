"""Checks for users and tests: of what graphs write and communicate, and whether a function equals the eager one."""

from functionalize.verify.communication import Communication, collectives
from functionalize.verify.functional import assert_functional, source_line
from functionalize.verify.observation import assert_equivalent, clone_inputs

__all__ = [
    "Communication",
    "assert_equivalent",
    "assert_functional",
    "clone_inputs",
    "collectives",
    "source_line",
]
