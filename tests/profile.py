"""The hypothesis profile of all tests: the same examples on every rank and on every run, and no clock."""

from hypothesis import settings

settings.register_profile("ranks", derandomize=True, deadline=None, database=None, max_examples=50)
settings.load_profile("ranks")
