"""What to do with a result: talk to it, and hand it on."""
