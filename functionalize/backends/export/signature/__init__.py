"""What an exported program takes, gives and leaves, and which of the captured calls it is.

Invariant: what cannot be taken, given or left is refused here, or asserted of the arguments. Limits: what lies between
the two, the graph that computes, is written by the folder above.
"""
