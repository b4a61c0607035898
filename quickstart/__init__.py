"""A small model, its data, and the run that `make quickstart` shows. `README.md` says what is what."""
