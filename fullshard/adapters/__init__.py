"""LoRA and QLoRA: fine-tuning in little memory.

4-bit weights in bitsandbytes' format (`nf4.py`, `bnb.py`), the layer that computes with them (`linear.py`), how they
are cut into shards (`groups.py`), and what a training job needs around PEFT (`lora.py`, `quantize.py`).
"""
