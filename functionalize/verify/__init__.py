"""Checks for users and tests: of what graphs write and communicate, and whether a function equals the eager one."""

from functionalize._torch.distributed.communication import Communication, Volume, collectives, volumes
from functionalize.verify.functional import assert_functional, source_line
from functionalize.verify.observation import assert_equivalent, clone_inputs

__all__ = [
    "Communication",
    "Volume",
    "assert_equivalent",
    "assert_functional",
    "clone_inputs",
    "collectives",
    "source_line",
    "volumes",
]
