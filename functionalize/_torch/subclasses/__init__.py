"""Tensor subclasses: what they hold, and what torch keeps of their operators."""
