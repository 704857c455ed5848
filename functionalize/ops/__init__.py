"""What each operator does: from the generated tables, or from its live schema."""
