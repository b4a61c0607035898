"""Imported first in the process that workers are forked from: assertions in the test modules it imports next are
rewritten as in pytest's own process."""

from tests.pool_worker import rewrite_assertions

rewrite_assertions()
