"""Runs scripts in one process, each as `fullshard launch` would: `in_turn.py [[SCRIPT, ARGUMENT, …], …]`."""

import json
import runpy
import sys

from accelerate.state import AcceleratorState, GradientState

for words in json.loads(sys.argv[1]):
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
