"""Why programs are refused: one table, a module for each subject; docs/reference/refusals.md is made of it."""
