"""Random numbers while a program is captured."""
