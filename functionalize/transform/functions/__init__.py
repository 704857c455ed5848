"""Functions of torch that are decomposed above the dispatcher."""
