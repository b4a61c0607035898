"""`python -m fullshard.train`: one rank of a training job, with the flags of `fullshard sft`."""

from fullshard.sft.__main__ import main

if __name__ == "__main__":
    main()
