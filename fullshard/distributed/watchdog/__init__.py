"""Ranks that hang, stop or disappear are named, and the run is ended."""
