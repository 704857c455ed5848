"""Programs without mutation for other compilers. Invariant: nothing is imported before it is asked for."""
