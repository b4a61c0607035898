"""Whether a training run fits on a machine and what it costs, before it starts."""
