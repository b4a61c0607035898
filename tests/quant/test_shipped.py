"""Models as they are shipped: the values that transformers reads from the same files, and training on top of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

import fullshard.spmd as xs
from fullshard import load_pretrained
from fullshard.config.errors import QuantizationError, WeightsError
from fullshard.distributed import runtime
from fullshard.fsdp import checkpoint_module
from fullshard.models.experts import use_own_experts
from fullshard.quant import stored_files
from fullshard.quant.quantize import quantize_model, quantized_experts, quantized_layers
from fullshard.quant.shipped import Shipped, Tensor
from fullshard.quant.stored_format import StoredWeight
from fullshard.quant.stored_linear import StoredLinear
from fullshard.quant.stored_values import encode
from fullshard.weights.locate import open_source
from fullshard.weights.merge_adapter import merge_adapter
from fullshard.weights.slice_reader import Stored
from tests.fsdp.programs import STRATEGIES, mesh_for, mine
from tests.pool import ranks
from tests.quant.programs import batches, train
from tests.quant.shipped_models import MXFP4, compressed, fp8, gpt_oss, llama, pack, qwen_moe, write

GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
INT4 = compressed("pack-quantized", ("lm_head", r"re:.*mlp\.gate$"), **GROUPS, symmetric=False)
NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
CHANNELS = compressed("float-quantized", num_bits=8, type="float", strategy="channel")


def odd_experts() -> Any:
    """Gate's rows are no multiple of a block, so gate and up have grids of scales of their own."""
    return qwen_moe(40)


MODELS = {
    "mxfp4": (gpt_oss, MXFP4),
    "fp8": (qwen_moe, fp8()),
    "fp8 exponents": (qwen_moe, fp8(scale_fmt="ue8m0")),
    "fp8 by tensor": (llama, fp8(None)),
    "fp8 partial blocks": (odd_experts, fp8()),
    "fp8 dense partial blocks": (llama, fp8((128, 128))),
    "int4": (qwen_moe, INT4),
    "nvfp4": (qwen_moe, NVFP4),
    "fp8 channels": (llama, CHANNELS),
}
ORACLE = ("mxfp4", "fp8", "fp8 exponents", "fp8 by tensor")
"""What transformers unpacks itself; it takes a partial last block for a smaller block."""


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """The unpacked quantized weights of a model."""
    linear = {f"{name}.weight": layer.dequantize() for name, layer in quantized_layers(model).items()}
    experts = quantized_experts(model).items()
    return linear | {f"{name}.{own}": module.dequantize(own) for name, module in experts for own in module.fused}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ORACLE)
def test_values_are_those_of_transformers(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    family, quantization = MODELS[kind]
    write(family(), quantization, tmp_path / "model")
    how: Any = (Mxfp4Config if kind == "mxfp4" else FineGrainedFP8Config)(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype, quantization_config=how).state_dict()
    ours = weights_of(load_pretrained(tmp_path / "model", dtype=dtype, progress=False))
    assert len(ours) == (4 if kind == "mxfp4" else 12 if family is qwen_moe else 14)
    for name, value in ours.items():
        assert value.dtype == dtype and torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ORACLE])
def test_values_of_other_formats_are_those_of_single_matrices(tmp_path: Path, kind: str) -> None:
    """Read from files, stacked and joined, they are what was unpacked from each matrix."""
    family, quantization = MODELS[kind]
    dense = write(family(), quantization, tmp_path / "model").state_dict()
    ours = weights_of(load_pretrained(tmp_path / "model", dtype=torch.float32, progress=False))
    assert ours
    for name, value in ours.items():
        assert torch.equal(value, dense[name]), name


def test_experts_that_are_stored_together(tmp_path: Path) -> None:
    dense = write(qwen_moe(), fp8(), tmp_path / "model", together=True).state_dict()
    ours = weights_of(load_pretrained(tmp_path / "model", dtype=torch.float32, progress=False))
    assert all(torch.equal(value, dense[name]) for name, value in ours.items()) and len(ours) == 12


@pytest.mark.parametrize("kind", MODELS)
def test_unpacked_while_loading(tmp_path: Path, kind: str) -> None:
    family, quantization = MODELS[kind]
    dense = write(family(), quantization, tmp_path / "model")
    model = load_pretrained(tmp_path / "model", dtype=torch.float32, dequantize=True, progress=False)
    assert not quantized_layers(model) and not hasattr(model.config, "quantization_config")
    found = model.state_dict()
    for name, value in dense.state_dict().items():
        assert torch.equal(found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name], value)


# --- training ---------------------------------------------------------------------------------------------------------


def with_lora(model: Any) -> Any:
    experts = [name for name, _ in model.named_modules() if name.endswith("experts")]
    targets = [f"{name}.{own}" for name in experts for own in ("gate_up_proj", "down_proj")]
    layers = ["q_proj", "o_proj"] if experts else ["q_proj", "o_proj", "gate_proj", "down_proj"]
    return get_peft_model(
        model, LoraConfig(r=4, lora_alpha=32, target_modules=layers, target_parameters=targets or None)
    )


def from_files(place: Path, strategy: str = "FULL_SHARD", **options: Any) -> Any:
    return load_pretrained(
        place, mesh_for(strategy), dtype=torch.float32, adapt=with_lora, strategy=strategy, progress=False,
        small_parameter_bytes=2048, **options,
    )  # fmt: skip


def written(place: Path, kind: str) -> Path:
    if runtime.is_main():
        family, quantization = MODELS[kind]
        write(family(), quantization, place)
    runtime.barrier()
    return place


def plain(place: Path, adapter: Path) -> Any:
    """The unpacked model in transformers, with PEFT's adapter."""
    dense = AutoModelForCausalLM.from_pretrained(place.with_name(f"{place.name}-dense"), dtype=torch.float32)
    dense.config._experts_implementation = "eager"
    return PeftModel.from_pretrained(dense, adapter, is_trainable=True)


def gradients(model: Any, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=rows, labels=rows).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).detach().cpu() for n, g in found.items()}


def compare(model: Any, alone: Any, steps: int = 3) -> None:
    """Losses of some steps, and the gradients after them."""
    expected = train(alone, steps, sharded=False)
    assert train(model, steps, sharded=True) == pytest.approx(expected, abs=1e-5)
    rows = batches(1)[0]
    ours, theirs = gradients(model, mine(rows)), gradients(alone, rows)
    assert ours.keys() == theirs.keys() and ours
    for name, gradient in theirs.items():
        assert gradient.any(), name
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


TRAINED = ("mxfp4", "fp8 partial blocks")


@ranks(1, 2, 4)
@pytest.mark.parametrize(
    "kind", [kind if kind in TRAINED else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS]
)
def test_losses_and_gradients_are_those_of_the_unpacked_model(tmp_path: Path, kind: str) -> None:
    place = written(tmp_path / "model", kind)
    model = from_files(place)
    model.save_pretrained(tmp_path / "first")
    runtime.barrier()
    if runtime.world_size() > 1:
        packed = [p for n, p in model.named_parameters() if n.endswith(("packed", "gate_up_proj"))]
        assert packed and all(p.to_local().shape[0] < p.shape[0] for p in packed), "bytes are not sharded"
    compare(model, plain(place, tmp_path / "first"))


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "offload"), list(itertools.product(STRATEGIES, [False, True])))
def test_strategies_and_offload(tmp_path: Path, strategy: str, offload: bool) -> None:
    place = written(tmp_path / "model", "mxfp4")
    model = from_files(place, strategy, cpu_offload=offload)
    model.save_pretrained(tmp_path / "first")
    runtime.barrier()
    compare(model, plain(place, tmp_path / "first"))


@ranks(2)
@pytest.mark.parametrize("kind", ["mxfp4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_our_experts_checkpointed_and_compiled(tmp_path: Path, kind: str) -> None:
    place = written(tmp_path / "model", kind)
    model = from_files(place)
    model.save_pretrained(tmp_path / "first")
    runtime.barrier()
    assert use_own_experts(model)
    for layer in model.base_model.model.model.layers:
        checkpoint_module(layer)
    model.compile_units(backend="aot_eager")
    compare(model, plain(place, tmp_path / "first"))


@pytest.mark.parametrize("kind", ["fp8", "int4", "nvfp4"])
def test_compiled_as_one_opaque_operator(kind: str) -> None:
    form = Shipped.of(MODELS[kind][1]).rules[0].format
    layer = StoredLinear(64, 48, stored=form)
    layer.set_parts(encode(form.coding, torch.randn(48, 64, generator=torch.Generator().manual_seed(0))))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, g = torch.randn(4, 64, requires_grad=True), torch.randn(4, 48)
    results = [(y := module(x), *torch.autograd.grad(y, x, g)) for module in (layer, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and results[0][0].any()


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8 channels", "mxfp4"])
def test_a_global_program(tmp_path: Path, kind: str) -> None:
    """Sharded inputs: the loss is over the global batch."""
    place = written(tmp_path / "model", kind)
    model = from_files(place)
    model.save_pretrained(tmp_path / "first")
    runtime.barrier()
    batch = batches(1)[0]
    ids = xs.mark_sharding(batch.clone(), mesh_for("FULL_SHARD"), ("fsdp", None))
    loss = model(input_ids=ids, labels=ids).loss
    expected = plain(place, tmp_path / "first")(input_ids=batch, labels=batch).loss
    assert loss.full_tensor().item() == pytest.approx(expected.item(), abs=1e-5)


# --- back to files ----------------------------------------------------------------------------------------------------


def adapter_on(dense: Any, place: Path, folder: Path) -> Any:
    """A trained adapter, saved as one on the files in `place`; the model that it belongs to."""
    torch.manual_seed(7)
    model = with_lora(dense)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    model.peft_config["default"].base_model_name_or_path = str(place)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int4", "fp8 partial blocks", "nvfp4", "fp8 channels"])
def test_merged_dense_and_in_the_format_of_the_files(tmp_path: Path, kind: str) -> None:
    family, quantization = MODELS[kind]
    dense = write(family(), quantization, tmp_path / "model")
    merged = adapter_on(dense, tmp_path / "model", tmp_path / "adapter").merge_and_unload().state_dict()
    out = merge_adapter(tmp_path / "adapter", tmp_path / "dense", progress=False, dtype="float32")
    plain_model = AutoModelForCausalLM.from_pretrained(out)
    assert not hasattr(plain_model.config, "quantization_config")
    for name, value in plain_model.state_dict().items():
        torch.testing.assert_close(value, merged[name], rtol=0, atol=1e-6, msg=name)

    errors: list[Any] = []
    again = merge_adapter(
        tmp_path / "adapter", tmp_path / "again", requantize=errors.extend, progress=False, dtype="float32"
    )
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", again))
    assert {k: (t.shape, t.dtype) for k, t in before.items()} == {k: (t.shape, t.dtype) for k, t in after.items()}
    loaded = load_pretrained(again, dtype=torch.float32, progress=False)
    measured = {error.name: error for error in errors}
    for name, value in weights_of(loaded).items():
        difference = (value - merged[name]).abs()
        if name in measured:
            assert difference.max() == pytest.approx(measured[name].largest, rel=1e-4)
            assert difference.mean() == pytest.approx(measured[name].mean, rel=1e-4)
            assert 0 < difference.mean() < 0.15 * merged[name].abs().mean()
        else:
            assert not difference.any(), "a weight that the adapter does not change has changed"
    stored = {k for k in before if "q_proj" not in k and "o_proj" not in k and "experts" not in k and "mlp" not in k}
    assert all(torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8)) for key in stored)
    if kind in ORACLE:
        how: Any = (Mxfp4Config if kind == "mxfp4" else FineGrainedFP8Config)(dequantize=True)
        theirs = AutoModelForCausalLM.from_pretrained(again, dtype=torch.float32, quantization_config=how).state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in weights_of(loaded).items())


@ranks(1, 2)
@pytest.mark.parametrize("kind", ["fp8 partial blocks", *(pytest.param(k, marks=pytest.mark.slow) for k in MODELS)])
def test_saved_as_it_was_loaded(tmp_path: Path, kind: str) -> None:
    """Names, shapes and bytes of the packed tensors; experts one by one again."""
    place = written(tmp_path / "model", kind)
    load_pretrained(place, mesh_for("FULL_SHARD"), progress=False, dtype=torch.float32).save_pretrained(
        tmp_path / "out"
    )
    runtime.barrier()
    before, after = (load_file(folder / "model.safetensors") for folder in (place, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value.view(-1).view(torch.uint8), after[name].view(-1).view(torch.uint8)), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == json.loads((place / "config.json").read_text())["quantization_config"]


def test_formats_of_a_model_may_have_scales_of_different_dtypes() -> None:
    groups = {
        "group_0": {"targets": ["re:.*self_attn.*"], "format": "float-quantized",
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
        "group_1": {"targets": ["Linear"], "format": "pack-quantized", "weights": GROUPS},
    }  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    names = {"layers.0.self_attn.q_proj": torch.float32, "layers.0.mlp.up_proj": torch.bfloat16}
    stored = {f"{name}.weight_scale": Tensor((4, 1), dtype) for name, dtype in names.items()}
    shipped = Shipped.of(config).with_scales_of(stored)
    found = [shipped.format_of(name, ["Linear"]) for name in names]
    assert [(f.name, f.coding.scale) for f in found if f] == [
        ("fp8 by channel", "float32"),
        ("int4 groups of 16", "bfloat16"),
    ]
    with pytest.raises(QuantizationError, match="in several dtypes"):
        shipped.with_scales_of({**stored, "layers.1.mlp.up_proj.weight_scale": Tensor((4, 1), torch.float16)})


def test_a_dense_base_is_not_requantized(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    adapter_on(llama(), tmp_path / "model", tmp_path / "adapter")
    with pytest.raises(WeightsError, match="not stored in a format that weights can be quantized into again"):
        merge_adapter(tmp_path / "adapter", tmp_path / "out", requantize=print, progress=False)


# --- what is refused --------------------------------------------------------------------------------------------------


def changed(place: Path, change: Any) -> Path:
    """The files with other tensors."""
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


KEY = "model.layers.1.self_attn.q_proj.weight_scale_inv"


@pytest.mark.parametrize("unpack", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(KEY), f"{KEY}: "),
        (
            lambda t: t.update({KEY: torch.ones(3, 4)}),
            rf"{KEY}: found float32 \[3, 4\], expected float32 \[4, 4\] for fp8",
        ),
        (lambda t: t.update({KEY: t[KEY].double()}), rf"{KEY}: found float64 \[4, 4\], expected float32"),
    ],
)
def test_a_scale_that_is_missing_or_does_not_fit(tmp_path: Path, change: Any, message: str, unpack: bool) -> None:
    write(llama(), fp8(), tmp_path / "model")
    with pytest.raises(WeightsError, match=message):
        load_pretrained(changed(tmp_path / "model", change), dequantize=unpack, progress=False)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, "quantization by awq is not supported; expected mxfp4, fp8, compressed-tensors"),
        (fp8(fmt="e5m2"), "fp8 weights of format 'e5m2' are not supported; expected e4m3"),
        (fp8(expert_dtype="fp4"), "experts in fp4"),
        (
            compressed("pack-quantized", num_bits=3, type="int", strategy="channel"),
            "packs 3 bits; expected one of 2, 4",
        ),
        (compressed("marlin-24", num_bits=4, type="int", strategy="channel"), "'marlin-24'; expected float-quantized"),
        ({**INT4, "transform_config": {"config_groups": {}, "x": 1}}, "rotated weights"),
        (compressed("pack-quantized", **{**GROUPS, "group_size": 48}), "64 columns are no multiple of the 48"),
        ({**fp8(), "weight_block_size": [128]}, "expected two sizes"),
        (compressed("float-quantized", ("Linear",), num_bits=8, type="float"), "has no layer that its"),
    ],
)
def test_unknown_formats(tmp_path: Path, quantization: Any, message: str) -> None:
    llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    (tmp_path / "model.safetensors").unlink()
    save_file({"none": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises((QuantizationError, WeightsError), match=message):
        load_pretrained(tmp_path, progress=False)


def test_layers_that_the_files_store_dense_stay_dense(tmp_path: Path) -> None:
    write(llama(), fp8(), tmp_path / "model")
    name = "model.layers.0.mlp.down_proj"

    def store_dense(tensors: Any) -> None:
        tensors.pop(f"{name}.weight_scale_inv")
        tensors[f"{name}.weight"] = torch.ones(64, 160, dtype=torch.bfloat16)

    changed(tmp_path / "model", store_dense)
    model = load_pretrained(tmp_path / "model", dtype=torch.float32, progress=False)
    assert name not in quantized_layers(model) and len(quantized_layers(model)) == 13


def test_an_unpacked_head(tmp_path: Path) -> None:
    """The head's weight is used as a whole, so it is unpacked while it is read."""
    quantization = fp8(modules_to_not_convert=["embed_tokens"])
    model = llama()
    dense = write(model, quantization, tmp_path / "model")
    values = {}

    def quantize_head(tensors: Any) -> None:
        parts, values["head"] = pack(Shipped.of(quantization).rules[0].format, tensors["lm_head.weight"])
        tensors |= {"lm_head.weight": parts["packed"], "lm_head.weight_scale_inv": parts["scales"]}

    changed(tmp_path / "model", quantize_head)
    loaded = load_pretrained(tmp_path / "model", dtype=torch.float32, progress=False)
    assert torch.equal(loaded.get_output_embeddings().weight.full_tensor(), values["head"])
    assert dense.lm_head.weight.shape == values["head"].shape


def test_scales_are_read_as_the_files_store_them(tmp_path: Path) -> None:
    """DeepSeek-V3.1 says that its scales are exponents and stores them in fp32."""
    dense = write(llama(), fp8(), tmp_path / "model").state_dict()
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    file.write_text(json.dumps(config))
    ours = weights_of(load_pretrained(tmp_path / "model", dtype=torch.float32, progress=False))
    assert all(torch.equal(value, dense[name]) for name, value in ours.items()) and len(ours) == 14


def test_a_model_with_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match="has dense weights already"):
        quantize_model(llama(), fp8())


def test_each_rank_reads_its_rows_only(tmp_path: Path) -> None:
    """A quarter of the rows of each part costs a quarter of its bytes."""
    write(qwen_moe(), INT4, tmp_path / "model")
    with open_source(tmp_path / "model") as source:
        stem = "model.layers.0.mlp.experts.0.gate_proj.weight"
        form = Shipped.of(INT4).with_scales_of(source.entries).rules[0].format
        weight = StoredWeight(form, 48, 64)
        for part, key in stored_files.file_names(weight, stem).items():
            height, width = weight.part_shapes()[part]
            before = source.bytes_read
            rows = stored_files.read_rows(weight, part, Stored(source, source.entries[key]), slice(0, -(-height // 4)))
            assert rows.numel() == -(-height // 4) * width == source.bytes_read - before, part
