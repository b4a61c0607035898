"""The watchdog: it names ranks that hang, stop or disappear, and ends the run."""
