"""How weights come in and go out: loading slices of files, checkpoints, and files that others read."""
