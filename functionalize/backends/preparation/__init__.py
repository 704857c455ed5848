"""What several backends make of a captured program, or learn of it, before their own work begins.

An example of a call, plain tensors in the place of wrappers, devices of the backend; inputs by their values, and what
is written as results; where gradients end. Limits: nothing here knows a backend, or the decompositions.
"""
