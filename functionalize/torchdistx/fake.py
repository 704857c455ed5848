"""``torchdistx.fake``. Invariant: the functions are this package's own. Limits: theirs."""

from functionalize.deferred.fakes import fake_mode, is_fake, meta_like

__all__ = ["fake_mode", "is_fake", "meta_like"]
