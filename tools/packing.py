"""Writes the table of model families in docs/packing.md: `python tools/packing.py`.

Every causal language model of transformers is built from its default configuration on the meta device and tried, as a
run tries its own. tests/models/test_packing_check.py (slow) fails where the table is not what the trial says.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fullshard.config.errors import first_line
from fullshard.models.packing_check import LEAKS, LOST, PackingVerdict, try_packing

PAGE = Path(__file__).resolve().parent.parent / "docs" / "packing.md"
START, END = "<!-- written by tools/packing.py -->\n", "<!-- end -->"
FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
ROWS = {
    "positions": "position ids that restart",
    "masks": "position ids and attention masks",
    "alone": "position ids, and one document at a time in some layers",
    LEAKS: f"refused: {LEAKS}",
    LOST: f"refused: {LOST}",
    "untried": "refused unless `trust_packing` is set: no small model of the class can be built, or runs on text alone",
    "no default": "not tested: its default configuration builds no model; yours is tested when you run",
}
MIXED = {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}
FILLED_IN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 128}, "hunyuan_v1_moe": {"head_dim": 128}, "lfm2": MIXED, "lfm2_moe": MIXED,
    "ministral": {"head_dim": 128}, "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
"""What default configurations lack; LFM2's has no convolutions."""


def family_model(name: str) -> Any:
    """A model of a family, on the meta device, from its default configuration."""
    config = CONFIG_MAPPING[name](**FILLED_IN.get(name, {}))
    if hasattr(config, "is_decoder"):
        config.is_decoder, config.add_cross_attention = True, False
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def row_of(verdict: PackingVerdict) -> str:
    """The key of the row that a verdict belongs to."""
    if verdict.way is None:
        return verdict.reason if verdict.tried else "untried"
    return "alone" if verdict.way.alone else "masks" if verdict.way.masks else "positions"


def row_of_family(name: str) -> tuple[str, str]:
    """The key of a family's row, and why."""
    try:
        model = family_model(name)
    except Exception as error:
        return "no default", first_line(error)
    verdict = try_packing(model, torch.device("cpu"), False)
    return row_of(verdict), verdict.reason or str(verdict.way)


def table(rows: dict[str, str]) -> str:
    lines = [
        f"With transformers {transformers.__version__}:",
        "",
        "| how documents are kept apart | families |",
        "|---|---|",
    ]
    for key, title in ROWS.items():
        names = ", ".join(f"`{name}`" for name in FAMILIES if rows[name] == key)
        lines += [f"| {title} | {names} |"] if names else []
    return "\n".join(lines) + "\n"


def listed() -> dict[str, str]:
    """The table on the page: the key of each family's row. Empty if it is that of another transformers."""
    text = PAGE.read_text().partition(START)[2].partition(END)[0]
    found: dict[str, str] = {}
    if f"transformers {transformers.__version__}:" not in text:
        return found
    for line in text.splitlines()[4:]:
        title, names = (cell.strip() for cell in line.strip("| ").split(" | "))
        key = next(key for key, words in ROWS.items() if words == title)
        found |= {name.strip("`"): key for name in names.split(", ")}
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = {}
    for name in FAMILIES:
        rows[name], why = row_of_family(name)
        print(f"{name}: {rows[name]} ({why})", flush=True)
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + table(rows) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
