"""Sizes and numbers that are symbols, and how torch's tracers record them."""
