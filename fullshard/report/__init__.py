"""What a run reports: terminal, metrics files, loggers, HTML report and model card."""
