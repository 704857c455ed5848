"""A captured program as one that writes nothing and says what is to be written: what all exporters begin with."""
