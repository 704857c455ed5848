"""Data-dependent Python numbers while a program is captured."""
