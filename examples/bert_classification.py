"""Text classification with BERT in an ordinary training loop, sharded by `fullshard.prepare`.

    python examples/bert_classification.py                                          # one process
    fullshard launch --num_processes 2 examples/bert_classification.py              # two processes, sharded
    fullshard launch --config_file fsdp.yaml examples/bert_classification.py        # settings from a file

The model is small with random weights, and the data is synthetic (does a text have more words of one kind than of the
other?), so nothing is downloaded. Only the import and `fullshard.prepare` are specific to fullshard.
"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

import fullshard
import fullshard.runtime as xr

WORDS, LENGTH, ROWS = 40, 16, 256


def build() -> torch.nn.Module:
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=LENGTH, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def texts(seed: int) -> TensorDataset:
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    low = (ids < WORDS // 2).sum(1)
    return TensorDataset(ids, (low > LENGTH // 2).long())


def mean(value: torch.Tensor) -> float:
    """The mean over all ranks."""
    total = value.detach().clone()
    if xr.world_size() > 1:
        torch.distributed.all_reduce(total)
    return total.item() / xr.world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="rows per process and step")
    options = parser.parse_args()

    xr.seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    loader = DataLoader(texts(seed=1), batch_size=options.batch_size, shuffle=True)
    model, optimizer, loader, scheduler = fullshard.prepare(model, optimizer, loader, scheduler)

    for epoch in range(options.epochs):
        losses, right = [], []
        for ids, labels in loader:
            output = model(input_ids=ids, labels=labels)
            output.loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(output.loss.detach().float())
            right.append((output.logits.argmax(-1) == labels).float().mean())
        loss, accuracy = mean(torch.stack(losses).mean()), mean(torch.stack(right).mean())
        xr.print0(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2f}, {len(loader)} steps")


if __name__ == "__main__":
    main()
