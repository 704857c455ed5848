"""Hands programs without mutation to other compilers. Invariant: nothing is imported before it is asked for."""
