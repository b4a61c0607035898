"""The XLA engine: layouts and plans become annotations of torch_xla's compiler, which partitions the program.

Only this room names torch_xla. `engine.py` is what the package registers.
"""
