"""TRL's `SFTTrainer` with a LoRA adapter and the flags of PEFT's guide to FSDP; it knows nothing of fullshard.

    python examples/peft_sft.py --model_name_or_path quickstart/model --dataset_name quickstart/data --output_dir out
    fullshard launch --config_file fsdp_config.yaml examples/peft_sft.py --model_name_or_path quickstart/model \
        --dataset_name quickstart/data --output_dir out --use_peft_lora True --lora_r 8 --packing True

Needs `pip install trl`. With `--use_4bit_quantization True` the frozen weights are held in 4 bits (QLoRA). All flags of
`SFTConfig` are taken, and those that the guide has for older versions of it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, HfArgumentParser
from trl import SFTConfig, SFTTrainer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class ModelArguments:
    model_name_or_path: str
    chat_template_format: str = "none"
    use_flash_attn: bool = False
    use_reentrant: bool = False
    use_peft_lora: bool = False
    lora_r: int = 64
    lora_alpha: int = 16
    lora_dropout: float = 0.1
    lora_target_modules: str = "all-linear"
    use_4bit_quantization: bool = False
    use_nested_quant: bool = False
    bnb_4bit_compute_dtype: str = "float32"
    bnb_4bit_quant_storage_dtype: str = "uint8"


@dataclass
class DataArguments:
    dataset_name: str
    splits: str = "train,test"
    append_concat_token: bool = False
    add_special_tokens: bool = False


@dataclass
class OlderNames:
    """Settings that the guide has under names of older versions of `SFTConfig`."""

    max_seq_length: int = 128
    evaluation_strategy: str = "no"
    warmup_ratio: float = 0.0


def load_model(options: ModelArguments) -> torch.nn.Module:
    storage, quantization = getattr(torch, options.bnb_4bit_quant_storage_dtype), None
    if options.use_4bit_quantization:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=options.use_nested_quant,
            bnb_4bit_compute_dtype=getattr(torch, options.bnb_4bit_compute_dtype), bnb_4bit_quant_storage=storage,
        )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(
        options.model_name_or_path,
        dtype=storage if quantization is not None and storage.is_floating_point else torch.float32,
        quantization_config=quantization,
        attn_implementation="flash_attention_2" if options.use_flash_attn else "sdpa",
    )


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, OlderNames, SFTConfig))
    model_args, data_args, older, training_args = parser.parse_args_into_dataclasses()
    training_args.max_length, training_args.warmup_steps = older.max_seq_length, older.warmup_ratio
    training_args.eval_strategy = older.evaluation_strategy
    training_args.gradient_checkpointing_kwargs = {"use_reentrant": model_args.use_reentrant}
    training_args.dataset_kwargs = {"add_special_tokens": data_args.add_special_tokens}

    model = load_model(model_args)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    if model_args.chat_template_format == "chatml":
        tokenizer.chat_template = CHATML
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8, mean_resizing=False)
    train_dataset, eval_dataset = (
        load_dataset(data_args.dataset_name, split=one) for one in data_args.splits.split(",")
    )
    peft_config = LoraConfig(
        r=model_args.lora_r, lora_alpha=model_args.lora_alpha, lora_dropout=model_args.lora_dropout, bias="none",
        task_type="CAUSAL_LM", target_modules=model_args.lora_target_modules,
    )  # fmt: skip

    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config if model_args.use_peft_lora else None,
    )
    trainer.accelerator.print(f"{trainer.model}")
    if model_args.use_peft_lora:
        trainer.model.print_trainable_parameters()
        if getattr(trainer.accelerator.state, "fsdp_plugin", None):
            from peft.utils.other import fsdp_auto_wrap_policy

            fsdp_plugin = trainer.accelerator.state.fsdp_plugin
            fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(trainer.model)

    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()

    prompt = torch.tensor([[1, 2, 3]], device=training_args.device)
    answer = trainer.model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)[0].tolist()
    if trainer.is_world_process_zero():
        logged = {key: [one[key] for one in trainer.state.log_history if key in one] for key in ("loss", "eval_loss")}
        found = {"losses": logged["loss"], "eval_losses": logged["eval_loss"], "answer": answer}
        Path(training_args.output_dir, "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
