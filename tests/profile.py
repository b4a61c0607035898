"""The hypothesis profile of all tests: the same examples on every rank and on every run, and no clock.

Where hypothesis is missing (a machine that only runs the GPU tests), there is nothing to set.
"""

import contextlib

with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    settings.register_profile("ranks", derandomize=True, deadline=None, database=None, max_examples=50)
    settings.load_profile("ranks")
