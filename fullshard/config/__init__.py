"""What can be set, by flag, file or variable, and what went wrong. Importing it imports nothing heavy."""
