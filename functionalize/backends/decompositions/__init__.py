"""Graphs decomposed into the operators that a backend has: what goes through a graph, and the tables that it reads.

`decompose` chooses for each node: `primitives`, our `own` decompositions, then torch's. `families` has the modules that
know one family of operators each.
"""
