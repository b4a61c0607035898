"""A small model, its data, and the run that `make quickstart` shows. `README.md` says what is what."""

import fullshard  # noqa: F401 - before peft, so that it has dealt with other libraries' messages
