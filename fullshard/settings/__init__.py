"""The settings of a training run: flags, YAML keys, arguments and documentation from one source."""
