"""`python -m fullshard.train`: one rank of `fullshard sft`, with the same words. A launcher runs this."""

from __future__ import annotations

import sys

from fullshard import messages
from fullshard.train.arguments import check_paths, parse


def main() -> None:
    messages.leave_out()
    arguments = parse(sys.argv[1:])
    check_paths(arguments.config)  # before torch is imported
    from fullshard.train.sft import run

    run(arguments.config, arguments.notes)


if __name__ == "__main__":
    main()
