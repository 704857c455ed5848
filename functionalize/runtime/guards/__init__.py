"""What a captured program requires of its calls."""
