"""Training checkpoints: saving, resuming, publishing, and turning them into model files."""
