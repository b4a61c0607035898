"""`python -m fullshard.train`: one rank of `fullshard sft`, with the same words. A launcher runs this."""

from __future__ import annotations

import sys

from fullshard import log_filter
from fullshard.train.cli_args import check_paths, parse


def main() -> None:
    log_filter.leave_out()
    arguments = parse(sys.argv[1:])
    check_paths(arguments.config)  # before torch is imported
    from fullshard.train.trainer import run

    run(arguments.config, arguments.notes)


if __name__ == "__main__":
    main()
