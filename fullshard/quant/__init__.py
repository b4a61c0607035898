"""Frozen weights in 4 bits: bitsandbytes' NF4 and FP4 formats, sharded together with their scales."""
