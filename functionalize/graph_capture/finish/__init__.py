"""The end of a capture: results, objects and sizes become metadata."""
