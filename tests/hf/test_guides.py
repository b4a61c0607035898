"""The scripts of PEFT's, Accelerate's and transformers' guides to FSDP, with the guides' files and flags, as printed.

The expected losses are those of the libraries alone: in one process, and on Accelerate's own FSDP where that works.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification, BertLMHeadModel

from tests.hf.launched import EXAMPLES, ORACLE, alone, launched, result
from tests.pool import ROOT

FILES = ROOT / "tests" / "launch" / "files"
BERT, TRAINER, PEFT = (EXAMPLES / name for name in ("accelerate_bert.py", "trainer_fsdp.py", "peft_sft.py"))
FP32 = ("--mixed_precision", "no")
IDS = torch.arange(3, 15)[None]


def with_file(name: str, *flags: str) -> tuple[str, ...]:
    return ("--config_file", str(FILES / f"{name}.yaml"), *flags)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The loop of Accelerate's guide, by Accelerate alone."""
    folder = tmp_path_factory.mktemp("bert")
    alone(BERT, "--output_dir", folder)
    return folder


def same_bert(folder, reference, losses=slice(None)):
    assert result(folder)["losses"] == pytest.approx(result(reference)["losses"][losses], abs=1e-4)
    found, expected = (BertForSequenceClassification.from_pretrained(one / "final") for one in (folder, reference))
    assert torch.allclose(logits(found), logits(expected), atol=1e-4)


@pytest.mark.slow
def test_a_loop_with_the_file_of_the_guide(bert, tmp_path):
    text = launched(BERT, "--output_dir", tmp_path, flags=with_file("trainer_fsdp", *FP32))
    assert "BertForSequenceClassification: FULL_SHARD on Mesh(fsdp=2): 3 unit(s)" in text  # two of BertLayer, the rest
    same_bert(tmp_path, bert)
    assert (tmp_path / "ckpt" / "pytorch_model_fsdp_0").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["fullshard", "accelerate"])
def test_load_state_resumes_a_sharded_checkpoint(writer, bert, tmp_path):
    flags = with_file("trainer_fsdp", *FP32)
    if writer == "fullshard":
        launched(BERT, "--output_dir", tmp_path, flags=flags)
    else:  # Accelerate cannot offload without a GPU
        own = ("--no_integrations", "--fsdp_offload_params", "false")
        launched(ORACLE, BERT, "--output_dir", tmp_path, flags=(*flags, *own))
    assert result(tmp_path)["losses"] == pytest.approx(result(bert)["losses"], abs=1e-4)
    launched(BERT, "--output_dir", tmp_path, "--resume", flags=flags)
    same_bert(tmp_path, bert, slice(8, None))


@pytest.mark.slow
def test_the_file_as_printed_in_bf16(bert, tmp_path, monkeypatch):
    """Against Accelerate's bf16 (autocast) in one process: rounding only."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    alone(BERT, "--output_dir", tmp_path / "reference")
    monkeypatch.undo()
    text = launched(BERT, "--output_dir", tmp_path / "ours", flags=with_file("trainer_fsdp"))
    assert "FULL_SHARD on Mesh(fsdp=2)" in text
    found, expected = (result(tmp_path / one)["losses"] for one in ("ours", "reference"))
    assert found == pytest.approx(expected, abs=5e-3) and expected != result(bert)["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("given", ["file", "arguments", "flags"])
def test_trainer_with_the_guides_settings(given, tmp_path):
    """The settings of the guide's file by themselves, in `TrainingArguments(fsdp=…, fsdp_config=…)`, and as flags."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, is_decoder=True,
    )  # fmt: skip
    BertLMHeadModel(config).save_pretrained(tmp_path / "model")
    words, reference, ours = ["--model", tmp_path / "model", "--output_dir"], tmp_path / "reference", tmp_path / "ours"
    alone(TRAINER, *words, reference)
    file = FILES / "trainer_fsdp.yaml"
    if given == "file":
        text = launched(TRAINER, *words, ours, "--fsdp", "", flags=with_file("trainer_fsdp", *FP32))
    elif given == "arguments":
        text = launched(TRAINER, *words, ours, "--fsdp", "full_shard auto_wrap", "--fsdp_config", file)
    else:
        text = launched(
            TRAINER, *words, ours, "--fsdp", "", flags=("--fsdp=full shard", f"--fsdp_config={file}", *FP32)
        )
    assert "BertLMHeadModel: FULL_SHARD on Mesh(fsdp=2): 3 unit(s)" in text
    assert ("fsdp_config: mixed_precision is ignored" in text) == (given == "arguments")
    found, expected = result(ours), result(reference)
    for name in ("before", "losses", "eval_losses"):
        assert found[name] == pytest.approx(expected[name], abs=1e-4), name
    assert found["answer"] == expected["answer"]
    models = [AutoModelForCausalLM.from_pretrained(one / "final") for one in (ours, reference)]
    assert torch.allclose(*map(logits, models), atol=1e-4)


COMMAND = """
    --seed 100 --chat_template_format chatml --add_special_tokens False --append_concat_token False
    --splits train[:64],test[:16] --max_seq_len 64 --max_steps 6 --logging_steps 1 --log_level info
    --logging_strategy steps --evaluation_strategy epoch --save_strategy steps --save_steps 3 --bf16 False
    --packing True --learning_rate 1e-3 --lr_scheduler_type cosine --weight_decay 1e-4 --warmup_ratio 0.0
    --max_grad_norm 1.0 --gradient_accumulation_steps 2 --gradient_checkpointing True --dataset_text_field content
    --use_flash_attn False --use_peft_lora True --lora_r 8 --lora_alpha 16 --lora_dropout 0.0
    --lora_target_modules all-linear --report_to none --disable_tqdm True
"""
"""The guide's command, with a smaller model and fewer steps, in fp32, without dropout (its numbers differ by rank)."""
LORA = "--use_reentrant False --use_4bit_quantization False"
QLORA = """
    --use_reentrant True --use_4bit_quantization True --use_nested_quant True --bnb_4bit_compute_dtype float32
    --bnb_4bit_quant_storage_dtype float32
"""


def peft_command(folder, rows: int, how: str, *more: object) -> list[object]:
    sizes = ["--per_device_train_batch_size", rows, "--per_device_eval_batch_size", rows]
    places = ["--model_name_or_path", ROOT / "quickstart" / "model", "--dataset_name", ROOT / "quickstart" / "data"]
    return [*COMMAND.split(), *how.split(), *places, "--output_dir", folder, *sizes, *more]


def adapter_logits(folder) -> torch.Tensor:
    from peft import PeftModel
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "quickstart" / "model", dtype=torch.float32)
    rows = load_file(folder / "adapter_model.safetensors")["base_model.model.model.embed_tokens.weight"]
    model.resize_token_embeddings(len(rows), mean_resizing=False)
    return logits(PeftModel.from_pretrained(model, folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "how", "precision", "tolerance"),
    # TRL trains the adapters of 4-bit models in bf16.
    [("peft_fsdp", LORA, FP32, 1e-4), ("peft_fsdp_qlora", QLORA, (), 1e-3)],
)
def test_sft_with_the_guides_file_and_command(file, how, precision, tolerance, tmp_path):
    reference, ours = tmp_path / "reference", tmp_path / "ours"
    alone(PEFT, *peft_command(reference, 4, how))
    text = launched(PEFT, *peft_command(ours, 2, how), flags=with_file(file, *precision))
    assert "PeftModelForCausalLM: FULL_SHARD on Mesh(fsdp=2)" in text
    same_sft(ours, reference, tolerance)
    assert torch.allclose(adapter_logits(ours), adapter_logits(reference), atol=50 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["fullshard", "trl", "accelerate"])
def test_sft_resumes_from_a_checkpoint(writer, tmp_path):
    """Written by this engine, by TRL in one process, and on Accelerate's own FSDP."""
    flags, written, ours = with_file("peft_fsdp", *FP32), tmp_path / "written", tmp_path / "ours"
    if writer == "trl":
        alone(PEFT, *peft_command(written, 4, LORA))
    elif writer == "fullshard":
        launched(PEFT, *peft_command(written, 2, LORA), flags=flags)
    else:
        launched(ORACLE, PEFT, *peft_command(written, 2, LORA), flags=(*flags, "--no_integrations"))
    resume = ["--resume_from_checkpoint", written / "checkpoint-3"]
    launched(PEFT, *peft_command(ours, 2, LORA, *resume), flags=flags)
    same_sft(ours, written, 1e-4)
    if writer != "trl":  # in one process the mean over the batches of the evaluation is another one
        assert result(ours)["eval_losses"] == pytest.approx(result(written)["eval_losses"], abs=1e-4)


def same_sft(folder, reference, tolerance):
    found, expected = result(folder), result(reference)
    assert found["losses"] == pytest.approx(expected["losses"], abs=tolerance) and len(found["losses"]) == 6
    assert found["answer"] == expected["answer"]
