"""Who owns a module, a class or a file: the program itself, a library, Python, torch, or this package.

Takes names of modules, files of code, or classes. Answers depend only on names and paths; nothing is imported.
"""

from __future__ import annotations

import functools
import os
import sys

_OF_PYTHON = os.path.dirname(os.__file__) + os.sep  # the folder of the standard library
_TORCH_AND_US = frozenset({"torch", "functionalize"})
_STANDARD = frozenset({"builtins", *sys.builtin_module_names, *sys.stdlib_module_names})


def root_of(name: object) -> str:
    """The top-level package of a module name; a class or a function may call its module anything."""
    return name.partition(".")[0] if isinstance(name, str) else ""


def name_of(cls: type) -> tuple[str, str]:
    """The names of a class's module and of the class."""
    return str(cls.__module__), cls.__qualname__


def is_own(name: object) -> bool:
    """Whether a module name is of the program itself: neither of Python nor of a library."""
    return type(name) is str and _is_own(name)


@functools.cache
def _is_own(name: str) -> bool:
    return not (is_of_torch_or_python(name) or _is_of_library(name))


def is_of_torch_or_python(name: object) -> bool:
    """Whether a module name is of torch, of this package, or of Python."""
    root = root_of(name)
    return root in _STANDARD or root in _TORCH_AND_US


def is_internal(name: object) -> bool:
    """Whether a module keeps no state of programs: it is of Python, of this package, or private in torch."""
    root, _, rest = str(name).partition(".")
    return root in sys.stdlib_module_names or root == "functionalize" or (root == "torch" and rest.startswith("_"))


def is_installed(cls: type) -> bool:
    """Whether a class is of Python or of a library."""
    return isinstance(cls.__module__, str) and _is_of_library(cls.__module__)


@functools.cache
def _is_of_library(name: str) -> bool:
    return is_library_file(getattr(sys.modules.get(name), "__file__", None) or "")


def is_library_file(file: str) -> bool:
    """Whether a file is of Python or of a library."""
    return _is_in_packages(file) or file.startswith(_OF_PYTHON)


@functools.cache
def is_of_python(file: str) -> bool:
    """Whether a file is of the standard library."""
    return file.startswith(_OF_PYTHON) and not _is_in_packages(file)


def _is_in_packages(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file
