"""Processes, ranks and devices: joining them, what they agree on, and who is missing."""
