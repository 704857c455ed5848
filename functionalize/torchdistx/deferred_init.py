"""``torchdistx.deferred_init``. Invariant: the functions are this package's own. Limits: theirs."""

from functionalize.deferred.api import deferred_init, is_deferred, materialize_module, materialize_tensor

__all__ = ["deferred_init", "is_deferred", "materialize_module", "materialize_tensor"]
