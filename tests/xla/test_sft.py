"""`fullshard sft` on XLA devices: the run of the torch engine, step by step; one program; few reads; what is saved."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

torch_xla = pytest.importorskip("torch_xla", reason="needs torch_xla")

from safetensors.torch import load_file  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

import fullshard  # noqa: E402
from fullshard import SFTConfig, SFTTrainer  # noqa: E402
from fullshard.config.errors import ConfigError, TrainingError  # noqa: E402
from fullshard.distributed import runtime  # noqa: E402
from fullshard.launch.sft_command import sft  # noqa: E402
from fullshard.xla.engine import ENGINE  # noqa: E402
from tests.sft.tiny import make_folder  # noqa: E402
from tests.xla.torch_engine import torch_python  # noqa: E402

STEPS = [
    "--max_steps", "6", "--save_strategy", "no", "--max_length", "48", "--torch_dtype", "float32",
    "--warmup_steps", "2", "--lr_scheduler_type", "cosine", "--learning_rate", "5e-3", "--max_grad_norm", "0.5",
    "--progress", "quiet",
]  # fmt: skip
KINDS = {
    "full": ["--eval_strategy", "steps", "--eval_steps", "3"],
    "lora": ["--use_peft_lora", "--lora_dropout", "0", "--lora_target_modules", "all-linear", "--packing"],
}
COMPARED = {"loss", "grad_norm", "learning_rate", "mean_token_accuracy", "eval_loss", "num_tokens", "epoch"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("sft"))


def words(folder: Path, out: str, *more: str) -> list[str]:
    return [
        "--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "data"), "--cache_dir",
        str(folder / "cache"), "--output_dir", str(folder / out), *STEPS, *more,
    ]  # fmt: skip


def records(folder: Path, out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


def on_xla(folder: Path, out: str, *more: str) -> list[dict[str, Any]]:
    assert sft(words(folder, out, *more)) == 0
    return records(folder, out)


def on_torch(folder: Path, out: str, *more: str) -> list[dict[str, Any]]:
    """The same on two Gloo ranks of the torch engine, with its own interpreter."""
    python = torch_python()
    flags = ["--num_processes", "2", "--use_cpu", "--quiet", *words(folder, out, *more)]
    subprocess.run([python, "-m", "fullshard", "sft", *flags], check=True, timeout=300)
    return records(folder, out)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_equals_the_torch_engine(folder, kind):
    """A global batch of 8 rows: 4 devices × 1 row × 2 micro-batches, and 2 ranks × 2 rows × 2."""
    accumulate = ["--gradient_accumulation_steps", "2", "--logging_steps", "1", *KINDS[kind]]
    xla = on_xla(folder, f"xla-{kind}", "--per_device_train_batch_size", "1", *accumulate)
    other = on_torch(folder, f"torch-{kind}", "--per_device_train_batch_size", "2", *accumulate)
    assert len(xla) == len(other) == 7 + 2 * (kind == "full")
    for mine, theirs in zip(xla, other, strict=True):
        assert mine.keys() == theirs.keys()
        for name in COMPARED & mine.keys():
            assert mine[name] == pytest.approx(theirs[name], abs=1e-5), (name, mine, theirs)
    name = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    mine, theirs = (load_file(folder / f"{engine}-{kind}" / name) for engine in ("xla", "torch"))
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-4)


class Watch(TrainerCallback):
    """Counts, for each step, the programs that were compiled and the values that were read."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []
        self.before = (0, 0)

    def on_step_begin(self, args, state, control, **facts):
        self.before = counts()

    def on_step_end(self, args, state, control, **facts):
        self.found.append(tuple(new - old for new, old in zip(counts(), self.before, strict=True)))


def counts() -> tuple[int, int]:
    import torch_xla.debug.metrics as metrics

    reads = metrics.metric_data("TransferFromDeviceTime")
    return ENGINE.compilations(), reads[0] if reads is not None else 0


def config(folder: Path, out: str, **changes: Any) -> SFTConfig:
    values = {
        "output_dir": str(folder / out), "cache_dir": str(folder / "cache"), "max_steps": 8, "learning_rate": 5e-3,
        "logging_steps": 4, "save_strategy": "no", "report_to": "none", "progress": "quiet", "max_length": 48,
        "per_device_train_batch_size": 1, "bf16": False, "use_peft_lora": True, "lora_dropout": 0.1,
        "lora_target_modules": "all-linear", "dataset_text_field": "text",
    }  # fmt: skip
    return SFTConfig(**{**values, **changes})


def trainer_of(folder: Path, out: str, *, callbacks: Any = None, **changes: Any) -> SFTTrainer:
    rows = str(folder / "data" / "train.jsonl")
    return SFTTrainer(str(folder / "model"), config(folder, out, **changes), train_dataset=rows, callbacks=callbacks)


def test_no_program_is_compiled_after_the_first_steps_and_no_value_is_read(folder):
    """Rows have many lengths, and the last batch of an epoch is incomplete (60 rows, 4 × 1 × 1 a step): one shape."""
    watch = Watch()
    trainer = trainer_of(folder, "watched", callbacks=[watch], max_steps=17, logging_steps=8)
    trainer.train()
    compiled, reads = zip(*watch.found, strict=True)
    assert sum(compiled[:3]) > 0 and not any(compiled[3:])
    assert not any(reads[3:])  # logging reads after the step
    assert [r["step"] for r in trainer.state.log_history if "loss" in r] == [8, 16, 17]
    assert trainer.loop.model.plan.axes == (("fsdp", 4),)


def test_resumed_steps_are_those_of_the_uninterrupted_run(folder):
    """With dropout: its random numbers belong to the step."""
    whole = trainer_of(folder, "whole", max_steps=6, logging_steps=1, save_strategy="steps", save_steps=3)
    whole.train()
    resumed = trainer_of(folder, "whole", max_steps=6, logging_steps=1, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoints" / "step-3"))
    expected, found = ({r["step"]: r["loss"] for r in one.state.log_history if "loss" in r} for one in (whole, resumed))
    assert {step: loss for step, loss in found.items() if step > 3} == pytest.approx(
        {step: loss for step, loss in expected.items() if step > 3}, abs=1e-6
    )
    resumed.save_model(str(folder / "adapter"))
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
    ids = torch.arange(3, 19).reshape(4, 4)
    resumed.model.eval()
    found = resumed.model(input_ids=ids.to(runtime.device())).logits.cpu()
    torch.testing.assert_close(found, adapted(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_not_finite_changes_nothing(folder):
    trainer = trainer_of(folder, "nan", max_steps=6, learning_rate=1e30, lr_scheduler_type="constant")
    with pytest.raises(TrainingError, match=r"step 2: the loss is (nan|inf)"):
        trainer.train()
    for name, p in trainer.model.named_parameters():
        assert bool(p.isfinite().all().cpu()), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_4bit_quantization": True}, "use_4bit_quantization is not supported on XLA: 4-bit weights"),
        ({"optim": "adafactor"}, "optim adafactor is not supported on XLA"),
        ({"bf16": False, "fp16": True}, "mixed_precision: fp16 needs a loss scaler"),
        ({"torch_compile": True}, "torch_compile is not supported on XLA"),
    ],
)
def test_what_training_on_xla_does_not_have(folder, changes, said):
    with pytest.raises(ConfigError) as raised:
        trainer_of(folder, "refused", **changes)
    assert said in str(raised.value)


def test_the_launcher_makes_the_devices(folder):
    """`xla: true` and four CPU devices in a file; one process of its own."""
    file = folder / "xla.yaml"
    file.write_text(
        "use_cpu: true\nnum_processes: 4\nfsdp_config:\n  xla: true\n  xla_fsdp_v2: true\n"
        "  xla_fsdp_grad_ckpt: true\n"
        "  xla_fsdp_settings: {compute_dtype: float32, buffer_dtype: float32, flatten_parameters: false}\n"
    )
    flags = ["--config_file", str(file), *words(folder, "launched", "--gradient_checkpointing", "false")]
    flags += ["--max_steps", "2", "--logging_steps", "1", "--per_device_train_batch_size", "1"]
    outside = {k: v for k, v in os.environ.items() if k not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    command = [sys.executable, "-m", "fullshard", "sft", *flags]
    done = subprocess.run(command, env=outside, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "4, driven by one process" in done.stderr
    first = records(folder, "launched")[0]
    assert first["epoch"] == pytest.approx(4 / 60)  # one row on each device
    about = json.loads((folder / "launched" / "settings.json").read_text())
    assert about["hardware"] == "4 × CPU device of XLA"


def test_a_loop_of_ones_own():
    """`fullshard.prepare`: the rows of a step are those of one batch per device, an incomplete step included."""
    torch.manual_seed(0)
    x, y = torch.randn(22, 6), torch.randn(22, 1)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = copy.deepcopy(plain)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(x, y)
    model, optimizer, loader = fullshard.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
    found, rows = [], []
    for inputs, targets in loader:
        assert fullshard.spmd.sharding_of(inputs).spec == ("batch", None)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        runtime.sync()
        found.append(loss.item())
        rows.append(len(inputs))
    assert rows == [8, 8, 6] and len(loader) == 3
    reference, expected = torch.optim.Adagrad(plain.parameters(), lr=0.1), []
    for part in (slice(0, 8), slice(8, 16), slice(16, 22)):
        loss = torch.nn.functional.mse_loss(plain(x[part]), y[part])
        loss.backward()
        reference.step()
        reference.zero_grad()
        expected.append(loss.item())
    assert found == pytest.approx(expected, abs=1e-6)
