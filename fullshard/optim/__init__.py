"""Optimizers and learning-rate schedules, and updates of sharded parameters."""
