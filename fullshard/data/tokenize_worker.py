"""The worker process of `tokenize.py`: receives a tokenizer, then batches of rows, and returns tokens."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from fullshard.data.tokenize import encode_chunk, pack_error

CHECK_INTERVAL = 1.0


def main(link: Connection, parent: int) -> None:
    """Tokenize batches until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    answer: Any
    try:
        setup = link.recv_bytes()
        try:
            tokenizer, settings = pickle.loads(setup)
            failure = None
        except Exception as error:  # such as a class defined in the main program
            tokenizer = settings = None
            failure = ("DataError", f"dataloader_num_workers: the tokenizer cannot be used in another process: {error}")
        while True:
            rows = pickle.loads(link.recv_bytes())
            try:
                answer = failure or (None, encode_chunk(rows, tokenizer, settings))
            except Exception as error:
                answer = pack_error(error)
            link.send_bytes(pickle.dumps(answer))
    except (EOFError, OSError):
        return


def _end_with(parent: int) -> None:
    """Exit when the parent process is gone. The pipe may stay open, if another process has inherited it."""
    while os.getppid() == parent:
        time.sleep(CHECK_INTERVAL)
    os._exit(1)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
