"""Which device orders this torch can keep in a process group: any from 2.12 on, ascending ones before."""

import inspect

import pytest
import torch

ANY_ORDER = "sort_ranks" in inspect.signature(torch.distributed.new_group).parameters
needs_any_order = pytest.mark.skipif(not ANY_ORDER, reason="needs torch 2.12: device orders other than ascending")


def keepable(specs):
    """Those of the specs (with axes by name) that need no reordering of ranks, where torch cannot reorder."""
    return [spec for spec in specs if ANY_ORDER or ("model", "data") not in spec]
