"""A captured program as one that writes nothing and says what is to be written: what all exporters begin with.

`signature` has what the program takes, gives and leaves, the modules here write its graph, and `passes` has what is
done to the exported program afterwards.
"""
