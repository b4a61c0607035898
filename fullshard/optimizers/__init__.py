"""The optimizers and learning-rate schedules that settings can name."""
