"""A captured program, its variants, and how a call of it runs."""
