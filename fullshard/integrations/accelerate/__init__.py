"""The engine underneath Accelerate. Importing it is cheap."""
