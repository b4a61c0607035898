"""What is kept of a forward pass for backward, where, and how much."""
