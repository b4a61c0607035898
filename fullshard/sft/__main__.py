"""`python -m fullshard.sft`: one rank of a training job, with the flags of `fullshard sft`.

Under `fullshard sft` the launcher has parsed and checked everything and hands the run over. Under torchrun, or alone,
this process parses and checks.
"""

from __future__ import annotations

import os
import sys

from fullshard.distributed import log_filter
from fullshard.sft.checked_run import RUN_VARIABLE, check_command, receive_run
from fullshard.sft.cli_args import parse


def main() -> None:
    """Train as one rank: a run that the launcher has handed over, or the one of this process's own command line."""
    log_filter.install_filters()
    handed = os.environ.pop(RUN_VARIABLE, None)  # not for processes that this one starts
    run = receive_run(handed) if handed is not None else check_command(parse(sys.argv[1:]))
    from fullshard.sft.trainer import train_run  # imports torch

    train_run(run)


if __name__ == "__main__":
    main()
