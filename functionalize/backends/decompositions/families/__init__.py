"""What operators of one family are composed of, a module for each family, by operators that engines have.

Invariant: no module here knows the tables, or what goes through a graph.
"""
