"""From the launched settings to a sharded model and data loader. Importing this package imports nothing heavy."""
