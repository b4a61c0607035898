"""The XLA engine: layouts and plans become annotations of torch_xla's compiler, which partitions the program.

Only this room names torch_xla. The packages' tables of names lead here where `engines.is_xla()`.
"""
