"""Runs scripts written for Accelerate, transformers' `Trainer` and TRL on this engine. Importing it is cheap."""
