"""The main job: from settings to a trained model. Importing this package imports nothing heavy."""
