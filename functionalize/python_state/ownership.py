"""Whose a module, a class or a file is: the program's own, a library's, Python's, torch's, or this package's.

Takes names of modules, files of code, or classes. Answers come of names and paths alone; nothing is imported.
"""

from __future__ import annotations

import functools
import os
import sys

_OF_PYTHON = os.path.dirname(os.__file__) + os.sep  # where the files of its modules are
_TORCH_AND_US = frozenset({"torch", "functionalize"})
_STANDARD = frozenset({"builtins", *sys.builtin_module_names, *sys.stdlib_module_names})


def root_of(name: str) -> str:
    """The package that a module is in, by its name."""
    return name.partition(".")[0]


@functools.cache
def is_own(name: object) -> bool:
    """Whether a module, by its name, is the program's own: neither Python's nor a library's."""
    if not isinstance(name, str):  # a class may call its module anything
        return False
    return not (is_of_torch_or_python(name) or _is_of_library(name))


@functools.cache
def is_of_torch_or_python(name: str) -> bool:
    """Whether a module, by its name, is one of torch's, of this package, or one of Python's."""
    root = root_of(name)
    return root in _STANDARD or root in _TORCH_AND_US


def is_internal(name: str) -> bool:
    """Whether a module, by its name, keeps no state of programs: one of Python's, ours, or torch's private ones."""
    root, _, rest = name.partition(".")
    return root in sys.stdlib_module_names or root == "functionalize" or (root == "torch" and rest.startswith("_"))


def is_installed(kind: type) -> bool:
    """Whether a class is one of Python's or of a library's."""
    return isinstance(kind.__module__, str) and _is_of_library(kind.__module__)


@functools.cache
def _is_of_library(name: str) -> bool:
    return is_library_file(getattr(sys.modules.get(name), "__file__", None) or "")


def is_library_file(file: str) -> bool:
    """Whether a file is one of Python's or of a library."""
    return _is_in_packages(file) or file.startswith(_OF_PYTHON)


def is_of_python(file: str) -> bool:
    """Whether a file is one of Python's own modules."""
    return file.startswith(_OF_PYTHON) and not _is_in_packages(file)


def _is_in_packages(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file
