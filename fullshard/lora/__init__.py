"""Adapters around PEFT: which layers get them, which parameters train, and what their files say."""
