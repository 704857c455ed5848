"""Other forms of a captured graph."""
