"""Messages between ranks reach the operation they were sent for."""

import itertools

import pytest
import torch

from fullshard.distributed import runtime
from fullshard.distributed.watchdog import investigate, watch
from fullshard.fsdp import FSDPv2
from fullshard.fsdp.build import make_link
from fullshard.fsdp.counters import Meter
from fullshard.fsdp.point_to_point import Exchange, message_tag
from tests.fsdp.programs import Block, Stack, mesh_for, mine
from tests.pool import ranks


def test_operations_have_different_tags():
    operations = list(itertools.product(range(0, 64, 7), range(0, 2048, 97), Exchange, range(0, 4096, 451)))
    tags = {message_tag(*operation) for operation in operations}
    assert len(tags) == len(operations)
    assert min(tags) >= 0 and max(tags) < 2**31
    assert message_tag(64, 2048, Exchange.SUM, 4096) == message_tag(0, 0, Exchange.SUM, 0)


@ranks(2)
@pytest.mark.parametrize("operation", ["gather", "scatter_sum", "sum"])
def test_models_that_share_a_communicator_do_not_take_each_others_messages(operation):
    """The ranks run two models in different orders: on one communicator only the tags tell their messages apart."""
    rank = runtime.rank()
    links = [make_link(mesh_for("FULL_SHARD"), ("fsdp",), "gather", None, Meter()) for _ in range(2)]
    assert links[0].group is links[1].group
    wholes = [torch.full((2, 4), 10.0 * model + rank) for model in range(2)]
    pending = {}
    for model in (0, 1) if rank == 0 else (1, 0):
        link, whole = links[model], wholes[model]
        if operation == "gather":
            pending[model] = link.gather([(whole, whole[rank].clone())], unit=0)
        else:
            pending[model] = getattr(link, operation)([whole], False, unit=0)
    for model in range(2):
        terms = [10.0 * model, 10.0 * model + 1]
        results = pending[model].wait()
        if operation == "gather":
            assert wholes[model].tolist() == [[term] * 4 for term in terms]
        else:
            assert set(results[0].flatten().tolist()) == {sum(terms)}


@ranks(2)
def test_messages_do_not_depend_on_what_the_watchdog_reports():
    torch.manual_seed(5)
    alone, model, rows = Stack().double(), Stack().double(), torch.randn(4, 8, dtype=torch.float64)
    model.load_state_dict(alone.state_dict())
    alone(rows).square().mean().backward()
    plain = watch.at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(investigate, "REPORT_AFTER", 1e9)  # ranks with different labels would look out of step to it
        patch.setattr(watch, "at", lambda step, unit, doing: plain(step, f"{unit} of rank {runtime.rank()}", doing))
        model = FSDPv2(model, mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, small_parameter_bytes=0)
        model(mine(rows)).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), alone.get_parameter(name).grad, rtol=0, atol=1e-12)
