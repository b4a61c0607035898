"""Ranks that hang, stop or disappear: found, named and ended."""
