"""Imported first in the process that workers are forked from: assertions in the test modules it imports next are
rewritten as in pytest's own process."""

from fullshard.distributed import log_filter
from tests.pool_worker import rewrite_assertions

log_filter.install_filters()  # before what the test modules import, as in our own commands
rewrite_assertions()
