"""What the table of JAX lowerings covers: torch's operator database on JAX, and the core ATen set."""
