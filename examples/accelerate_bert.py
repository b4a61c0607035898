"""Text classification with BERT in a loop for Accelerate, as its guide to FSDP has it; it knows nothing of fullshard.

    python examples/accelerate_bert.py --output_dir out                                      # Accelerate alone
    fullshard launch --config_file fsdp_config.yaml examples/accelerate_bert.py --output_dir out
    fullshard launch --config_file fsdp_config.yaml examples/accelerate_bert.py --output_dir out --resume

Sharded checkpoints while it trains, `load_state` to resume, and the whole weights at the end, as a folder that
`from_pretrained` loads. The model is small and the data made up.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

WORDS, LENGTH, ROWS, BATCH = 40, 16, 64, 8


def build() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=LENGTH, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def texts(seed: int) -> TensorDataset:
    """Does a text have more words of one kind than of the other?"""
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(ids, ((ids < WORDS // 2).sum(1) > LENGTH // 2).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="train on from the checkpoint of the first epoch")
    options = parser.parse_args()
    checkpoint = str(options.output_dir / "ckpt")

    set_seed(7)
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        step_scheduler_with_optimizer=False,
    )
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(texts(seed=1), batch_size=BATCH, shuffle=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, options.epochs * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if options.resume:
        accelerator.load_state(checkpoint)

    losses = []
    for epoch in range(1 if options.resume else 0, options.epochs):
        loader.set_epoch(epoch)
        for ids, labels in loader:
            loss = model(input_ids=ids, labels=labels).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().float().reshape(1)).mean().item())
        if epoch == 0:
            accelerator.save_state(checkpoint)

    if (plugin := getattr(accelerator.state, "fsdp_plugin", None)) is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")
    accelerator.unwrap_model(model).save_pretrained(
        options.output_dir / "final", is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )  # fmt: skip
    if accelerator.is_main_process:
        (options.output_dir / "result.json").write_text(json.dumps({"losses": losses}))
    accelerator.print(f"loss {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
