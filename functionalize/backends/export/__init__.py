"""A captured program as one that writes nothing and says what is to be written: what all exporters begin with.

`exported_program` makes a ``torch.export.ExportedProgram`` of one, and the reverse. `signature` has what the program
takes, gives and leaves, the other modules here write its graph, and `passes` has what is done to it afterwards.
"""
