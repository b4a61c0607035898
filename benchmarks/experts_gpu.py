"""Fine-tuning mixtures of experts on one GPU: fullshard beside transformers + PEFT, and beside the floor of the parts.

    python benchmarks/experts_gpu.py                           # the whole table
    python benchmarks/experts_gpu.py --row qwen-lora qwen-qlora --out results.jsonl
    python benchmarks/experts_gpu.py --floor                   # what products and attention of a layer take alone
    python benchmarks/experts_gpu.py --tiny                    # a smoke run of a tiny model, on a CPU too

*qwen* is Qwen3-30B-A3B cut to 16 layers, *oss* gpt-oss-20b cut to 12, *30b* Qwen3-30B-A3B whole, with random weights
that are made on the GPU. A step has 8 × 2048 tokens (30b: 1 × 2048, with a memory budget). Each run is a process of its
own: ours is `fullshard.SFTTrainer`, the peer a plain loop of transformers with `grouped_mm` and PEFT, with the same
targets, rows, dtypes and optimizer. Tokens per second are over the median of the timed steps; memory is torch's peak of
the timed steps, and so is what was planned for it, without CUDA's context and what the plan leaves free. "Level" is the
time of the last tenth of the steps in units of the first's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # in place of this folder, whose names are no modules' names

import torch  # noqa: E402

from benchmarks.sft_files import LORA, write_tokenizer  # noqa: E402
from benchmarks.sft_rank import GPU, LEARNING, RESULT, Clock, documents  # noqa: E402

QWEN = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
OSS = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("Qwen3Moe", {**QWEN, "num_hidden_layers": 16}),
    "30b": ("Qwen3Moe", {**QWEN, "num_hidden_layers": 48}),
    "oss": ("GptOss", {**OSS, "num_hidden_layers": 12}),
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FREE, ON = {"gradient_checkpointing": False}, {"gradient_checkpointing": True}
FOUR_BITS = {"use_4bit_quantization": True, "use_nested_quant": True}
IN_BF16 = {"optim": "sgd", "bf16": False}
"""Weights are bf16 and stay so, as the peer's do; with `bf16` trained ones would have fp32 masters."""
WARM_UP = 4
MOMENTS = ("forward", "loss", "backward", "optimizer step")
"""The moments of the timed steps."""


def _within(size: str) -> dict[str, Any]:
    """Settings for a run in so much memory: without, it takes what makes it faster of a GPU's."""
    return {"gradient_checkpointing": size}


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    goal: str
    shape: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Ours; the peer follows `gradient_checkpointing`."""
    experts: bool = True
    """Whether experts get adapters."""
    full: bool = False
    peer: bool = True
    """Whether transformers + PEFT can run it: bitsandbytes leaves experts dense."""
    rows: int = 8
    steps: int = 12


ROWS = {
    "qwen-lora": Row("≥ 65,000 tok/s", "qwen", FREE),
    "qwen-attention": Row("≥ 75,000 tok/s", "qwen", FREE, experts=False),
    "qwen-checkpointing": Row("≥ 45,000 tok/s, ≤ 27 GiB", "qwen", ON),
    "qwen-qlora": Row("≥ 38,000 tok/s, level over 200 steps", "qwen", {**ON, **FOUR_BITS}, peer=False, steps=204),
    "oss-lora": Row("≥ 45,000 tok/s", "oss", FREE),
    "qwen-full": Row("≥ 0.65 of the floor, ≥ 1.4 × transformers", "qwen", {**FREE, **IN_BF16}, full=True),
    "30b-lora": Row("≤ 63.5 GiB", "30b", _within("63GiB"), peer=False, rows=1),
    "30b-qlora": Row("≤ 21 GiB", "30b", {**FOUR_BITS, **_within("20.5GiB")}, peer=False, rows=1),
    "30b-qlora-bf16": Row(
        "≤ 18.8 GiB", "30b", {**FOUR_BITS, **_within("18.5GiB"), "adapter_dtype": "bfloat16"}, peer=False, rows=1
    ),
    "30b-qlora-offload": Row(
        "≤ 8 GiB", "30b", {**FOUR_BITS, **_within("7.8GiB"), "offload_experts": True}, peer=False, rows=1
    ),
}  # fmt: skip


# --- one run ----------------------------------------------------------------------------------------------------------


def make_model(shape: str, tiny: bool) -> Any:
    """A model with random weights, made where it runs."""
    import transformers

    family, sizes = SHAPES[shape]
    if tiny:
        sizes = TINY
    config = getattr(transformers, f"{family}Config")(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, use_cache=False, dtype=torch.bfloat16 if GPU else torch.float32,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    p.normal_(std=0.02)
    return model


def lora_config(row: Row, model: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        **LORA,
        lora_dropout=0.0,
        target_modules=list(ATTENTION),
        target_parameters=list(EXPERTS) if row.experts else None,
    )


def ours(row: Row, job: dict[str, Any], clock: Clock) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from fullshard import SFTConfig, SFTTrainer

    model = make_model(row.shape, job["tiny"])
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        (Path(folder) / "config.json").write_text(model.config.to_json_string())
        args = SFTConfig(
            output_dir=f"{folder}/output", max_steps=job["steps"], per_device_train_batch_size=job["rows"],
            max_length=job["length"], logging_strategy="no", save_strategy="no", progress="quiet",
            train_sampling_strategy="sequential", use_cpu=not GPU, use_peft_lora=not row.full,
            torch_compile=not job["tiny"], router_aux_loss_coef=0.0, **{"bf16": GPU, **LEARNING, **row.settings},
        )  # fmt: skip
        trainer = SFTTrainer(
            model=model, args=args, train_dataset=[{"input_ids": one} for one in documents(job)],
            processing_class=AutoTokenizer.from_pretrained(folder), callbacks=[clock.callback()],
            peft_config=None if row.full else lora_config(row, model),
        )  # fmt: skip
        del model
        trainer.train()
    planned = trainer.estimate
    if planned is None:
        return {}
    peak = max(sum(planned.memory.moments[moment].values()) for moment in MOMENTS)
    return {"planned": peak / 2**30, "planned_ms": planned.time.total * 1e3}


def peer(row: Row, job: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """transformers and PEFT in a plain loop."""
    from peft import get_peft_model

    model = make_model(row.shape, job["tiny"])
    model.set_experts_implementation("grouped_mm")
    if not row.full:
        model = get_peft_model(model, lora_config(row, model))
    if row.settings["gradient_checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate = LEARNING["learning_rate"]
    optimizer = torch.optim.SGD(parameters, rate) if row.full else torch.optim.AdamW(parameters, rate, fused=True)
    ids, device = torch.tensor(documents(job)).split(job["rows"]), next(model.parameters()).device
    model.train()
    timed = torch.zeros((), device=device)
    for step, batch in enumerate(ids[: job["steps"]], 1):
        rows = batch.to(device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, LEARNING["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        if step <= WARM_UP:
            clock.losses[step] = loss.item()
        else:
            timed += loss.detach()
        clock.tick(step)
    clock.losses[job["steps"]] = timed.item() / (job["steps"] - WARM_UP)
    return {}


def run_one(name: str, who: str, tiny: bool) -> dict[str, Any]:
    row = ROWS[name]
    job = {
        "rows": 2 if tiny else row.rows, "length": 32 if tiny else 2048, "steps": 8 if tiny else row.steps,
        "warm_up": WARM_UP, "packed": False, "tiny": tiny,
        "vocabulary": TINY["vocab_size"] if tiny else SHAPES[row.shape][1]["vocab_size"],
    }  # fmt: skip
    clock = Clock(job)
    more = (ours if who == "ours" else peer)(row, job, clock)
    found = clock.report(job["rows"] * job["length"]) | more
    return found | {"level": level(clock)}


def level(clock: Clock) -> float:
    """How much longer the last tenth of the timed steps takes than the first."""
    pairs = zip(clock.marks, clock.marks[1:], strict=False)
    times = [a.elapsed_time(b) if GPU else b - a for a, b in pairs]
    tenth = max(1, len(times) // 10)
    return statistics.median(times[-tenth:]) / statistics.median(times[:tenth])


# --- the floor --------------------------------------------------------------------------------------------------------


def milliseconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """The median time of some work on the GPU."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def floor(shape: str, tokens: int = 16384, length: int = 2048) -> dict[str, float]:
    """Milliseconds of the parts of a layer and of the head, alone: products of all experts with balanced routing,
    forward, for the input's and for the weight's gradient, attention, and its projections."""
    sizes = SHAPES[shape][1]
    hidden, heads, side = sizes["hidden_size"], sizes["num_attention_heads"], sizes["head_dim"]
    inner = sizes.get("moe_intermediate_size", sizes["intermediate_size"])
    count = sizes.get("num_experts") or sizes["num_local_experts"]
    pairs = tokens * sizes["num_experts_per_tok"]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    order = torch.randperm(pairs, device="cuda")
    ends = torch.arange(1, count + 1, device="cuda", dtype=torch.int32) * (pairs // count)
    x, wide, narrow = draw(pairs, hidden), draw(pairs, 2 * inner), draw(pairs, inner)
    up, down = draw(count, 2 * inner, hidden), draw(count, hidden, inner)
    mm = torch.nn.functional.grouped_mm
    found = {
        "gate and up": milliseconds(lambda: mm(x, up.transpose(1, 2), offs=ends)),
        "down": milliseconds(lambda: mm(narrow, down.transpose(1, 2), offs=ends)),
        "gradient of down's input": milliseconds(lambda: mm(x, down, offs=ends)),
        "gradient of the input": milliseconds(lambda: mm(wide, up, offs=ends)),
        "gradient of gate and up": milliseconds(lambda: mm(wide.t(), x, offs=ends)),
        "gradient of down": milliseconds(lambda: mm(x.t(), narrow, offs=ends)),
        "a permutation of rows": milliseconds(lambda: x.index_select(0, order)),
    }
    q, k, v = (
        draw(tokens // length, n, length, side).requires_grad_() for n in (heads, *[sizes["num_key_value_heads"]] * 2)
    )

    def attend() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), out)

    found["attention, both ways"] = milliseconds(attend)
    states, projection = x[:tokens], draw(hidden, side * (2 * heads + 2 * sizes["num_key_value_heads"]))
    found["q, k, v, o, each way"] = milliseconds(lambda: states @ projection)
    head = draw(hidden, sizes["vocab_size"])
    found["head, each way"] = milliseconds(lambda: [part @ head for part in states.split(2048)])
    return found


def step_floor(parts: dict[str, float], layers: int, full: bool) -> float:
    """Milliseconds of a step of nothing but the parts."""
    experts = sum(parts[name] for name in ("gate and up", "down", "gradient of down's input", "gradient of the input"))
    weights = parts["gradient of gate and up"] + parts["gradient of down"] if full else 0.0
    ways = 3 if full else 2
    layer = experts + weights + parts["attention, both ways"] + ways * parts["q, k, v, o, each way"]
    return layers * layer + ways * parts["head, each way"]


# --- the table --------------------------------------------------------------------------------------------------------


def in_a_process(name: str, who: str, options: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, str(Path(__file__).resolve()), "--one", name, who, *(["--tiny"] if options.tiny else [])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=options.timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {options.timeout} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        print(done.stderr[-4000:], file=sys.stderr, flush=True)
        return {"error": (done.stderr.strip().splitlines() or ["it gave no result"])[-1][:200]}
    return json.loads(lines[-1].removeprefix(RESULT))


def show(lines: list[dict[str, Any]]) -> None:
    ratios = ("planned ÷ measured", "the same for time", "level")
    heads = ("row", "goal", "who", "tok/s", "GiB", *ratios, "loss, first → mean of the timed")
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for line in lines:
        start = f"| {line['row']} | {ROWS[line['row']].goal} | {line['who']} |"
        if "error" in line:
            print(f"{start} {line['error']} | | | | | |")
            continue
        peak, losses = line.get("steps_allocated"), line["losses"]
        ratio = f"{line['planned'] / peak:.3f}" if peak and "planned" in line else ""
        shown = f"{losses[min(losses, key=int)]:.4f} → {losses[max(losses, key=int)]:.4f}" if losses else ""
        memory = "" if peak is None else f"{peak:.1f}"
        duration = f"{line['planned_ms'] / line['step_ms']:.2f}" if "planned_ms" in line else ""
        print(f"{start} {line['tok_s']:,.0f} | {memory} | {ratio} | {duration} | {line['level']:.2f} | {shown} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--who", nargs="+", choices=("ours", "peer"), default=["ours", "peer"])
    parser.add_argument("--floor", action="store_true", help="measure the floor of the parts only")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU too")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one run")
    parser.add_argument("--out", help="a file that gets a line of JSON for each run")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        began = time.perf_counter()
        found = run_one(*options.one, tiny=options.tiny)
        print(RESULT + json.dumps(found | {"seconds": round(time.perf_counter() - began, 1)}), flush=True)
        return 0
    if not (GPU or options.tiny):
        print("there is no GPU here; --tiny runs a tiny model on the CPU", file=sys.stderr)
        return 2
    if GPU and not options.tiny:
        for shape in ("qwen", "oss"):
            parts, layers = floor(shape), SHAPES[shape][1]["num_hidden_layers"]
            floors = {kind: 16384 / step_floor(parts, layers, kind == "full") * 1e3 for kind in ("lora", "full")}
            print(json.dumps({"floor": shape, "ms": parts, "tok_s": floors}), flush=True)
    lines: list[dict[str, Any]] = []
    for name in [] if options.floor else options.row:
        for who in options.who:
            if who == "peer" and not ROWS[name].peer:
                continue
            lines.append({"row": name, "who": who, **in_a_process(name, who, options)})
            print(json.dumps(lines[-1]), flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    if lines:
        show(lines)
    return 1 if any("error" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
