"""Guards: the conditions under which a captured program runs a call."""
