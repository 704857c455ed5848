"""The functionalization transform: one dispatch mode, one op at a time."""
