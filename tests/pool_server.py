"""Imported first in the process that workers are forked from: assertions in the test modules it imports next are
rewritten as in pytest's own process."""

import fullshard  # noqa: F401 - before what the test modules import, as in every process of the product
from tests.pool_worker import rewrite_assertions

rewrite_assertions()
