"""What a call of a captured program does. Knows nothing of how programs are captured."""
