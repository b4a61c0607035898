"""`python -m fullshard`, which also works where the `fullshard` command is not on the path."""

from fullshard.cli import main

if __name__ == "__main__":
    main()
