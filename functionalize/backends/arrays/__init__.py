"""Programs on the arrays of another library (JAX, NumPy, your own), by a table of what computes each operator.

A backend of your own is made of these classes, which functionalize.backends exports. Limits: no library is known here.
"""
