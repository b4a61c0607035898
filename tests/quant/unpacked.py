"""What packed 4-bit values mean, written out: the oracle where bitsandbytes' kernel for CPUs is none.

That kernel (0.50.2) looks for the scales of a row as if a row had `columns // blocksize` of them, so it is right only
where rows are whole blocks. Tests call it for such rows alone.
"""

import bitsandbytes.functional as bnb
import torch


def unpacked(packed, state):
    """The weight of `quantize_4bit`: the first of two values is in the high half of a byte, and blocks go over rows."""
    held, count = packed.reshape(-1).view(torch.uint8), state.shape.numel()
    codes = torch.stack([held >> 4, held & 15], dim=1).reshape(-1)[:count]
    scales = state.absmax
    if state.nested:
        scales = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    values = state.code[codes.long()] * scales.float().repeat_interleave(state.blocksize)[:count]
    return values.view(state.shape).to(state.dtype)


def unpacked_by_bnb(packed, state):
    """The same by bitsandbytes."""
    assert state.shape[-1] % state.blocksize == 0, f"rows of {state.shape[-1]} are no whole blocks: use unpacked()"
    return bnb.dequantize_4bit(packed, state)
