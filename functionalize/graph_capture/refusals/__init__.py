"""Refusals of a capture: found while the program runs, or afterwards."""
