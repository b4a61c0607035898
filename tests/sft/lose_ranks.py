"""Loses ranks of real `fullshard sft` jobs and checks what the user gets to see: `python -m tests.sft.lose_ranks`.

Each try starts a job of a tiny model on CPU ranks, and stops (SIGSTOP) or kills (SIGKILL) a rank at a place or at a
moment drawn from the seed. The job must name that rank, end in time with the documented exit code, and show no
traceback. Processes are forked from this one, which has imported everything; with `--cold` they are started afresh.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# isort: split
import peft  # noqa: F401
import torch
import transformers.models.llama.modeling_llama  # noqa: F401
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from fullshard.cli import main as command_line
from fullshard.distributed.processes import stat_of
from fullshard.launch import worker
from fullshard.launch.worker import EXIT_RANK_LOST
from tests.sft.faults import HOWS, PLACES, STOP, Fault, draw_place, lose_at
from tests.sft.tiny import children_of, make_folder

TIME_OUT = 8
REPORT_WITHIN = 12.0
"""Seconds until a stopped rank must have been named: 6 without a heartbeat, and what a busy machine takes."""
END_WITHIN = 50.0
"""Seconds until the job must have ended: 30 where a rank waits in something that has a longer time-out of its own."""
START_WITHIN = 240.0


# --- one rank ---------------------------------------------------------------------------------------------------------


class Forked:
    """A rank's process, as the launcher sees it; forked, so that nothing is imported again."""

    def __init__(self, handler: Any, words: tuple[str, ...], environment: dict[str, str]):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            for stream, number in ((handler._stdout, 1), (handler._stderr, 2)):
                if stream is not None:
                    os.dup2(stream.fileno(), number)
            os.closerange(3, 4096)
            for job in list(weakref.finalize._registry):  # type: ignore[attr-defined]
                job.detach()  # temporary folders are those of the processes that made them
            os.environ.clear()
            os.environ.update(environment)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            (Path(environment["LOSE_FOLDER"]) / f"pid-{environment['RANK']}").write_text(str(os.getpid()))
            lose_at(Fault(**json.loads(environment["LOSE"])), Path(environment["LOSE_FOLDER"]))
            worker.main(list(words[3:]))
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


# --- one job ----------------------------------------------------------------------------------------------------------


@dataclass
class Try:
    """One job that loses ranks."""

    fault: Fault
    folder: Path
    cold: bool
    pid: int = 0
    code: int | None = None
    began: float = field(default_factory=time.monotonic)
    trains: float | None = None
    lost: float | None = None
    named: float | None = None
    ended: float | None = None
    continued: bool = False

    @property
    def slack(self) -> float:
        """Seconds that the other ranks may still need to start themselves."""
        return 60.0 if self.cold else 0.0

    @property
    def text(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self, model: Path, world: int, more: list[str]) -> None:
        self.folder.mkdir(parents=True)
        words = [
            "sft", "--cpu", "--num_processes", str(world), "--model_name_or_path", str(model / "model"),
            "--dataset_name", str(model / "data"), "--output_dir", str(self.folder / "out"), "--ddp_timeout",
            str(TIME_OUT), "--max_steps", "400" if not self.fault.place else "9", "--eval_strategy", "steps",
            "--eval_steps", "3", "--save_steps", "4", "--logging_steps", "1", "--max_seq_len", "48", "--report_to",
            "none", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", *more,
        ]  # fmt: skip
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number in (1, 2):
                os.dup2(log, number)
            os.setsid()
            os.environ |= {
                "FULLSHARD_INIT_TIMEOUT": "25",
                "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FULLSHARD_CACHE": str(self.folder / "cache"),
                "XDG_CONFIG_HOME": str(self.folder), "HF_HOME": str(self.folder),
                "LOSE": json.dumps(vars(self.fault)), "LOSE_FOLDER": str(self.folder),
            }  # fmt: skip
            if self.cold:
                os.execv(sys.executable, [sys.executable, "-m", "fullshard", *words])
            torch.set_num_threads(1)
            subprocess_handler.SubprocessHandler._popen = lambda handler, *given: Forked(handler, *given)
            sys.argv = ["fullshard", *words]
            try:
                command_line()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(bool(end.code))
            except BaseException:
                traceback.print_exc()
        finally:
            os._exit(code)

    def look(self) -> bool:
        """Go on with the try; whether it is over."""
        now = time.monotonic()
        found, status = os.waitpid(self.pid, os.WNOHANG)
        if found:
            self.code, self.ended = os.waitstatus_to_exitcode(status), now
        text = self.text if (self.folder / "log").exists() else ""
        if self.trains is None and "plan: " in text:
            self.trains = now
        if self.lost is None:
            self._lose(now)
        if self.lost is not None and self.named is None and names(text, self.fault):
            self.named = now
        if self.lost is not None and not self.continued and self._may_go_on():
            self.continued = True
            for rank in self.fault.ranks:
                os.kill(self.ranks()[rank], signal.SIGCONT)
        since, limit = (self.began, START_WITHIN) if self.lost is None else (self.lost, END_WITHIN + self.slack + 10)
        return bool(found) or now - since > limit

    def _lose(self, now: float) -> None:
        marks = {rank: self.folder / f"lost-{rank}" for rank in self.fault.ranks}
        if self.fault.place:
            if all(mark.exists() and mark.read_text() for mark in marks.values()):
                self.lost = now
            return
        since = self.began if self.cold else self.trains
        if since is None or now - since < self.fault.seconds:
            return
        ranks = self.ranks()
        number = {"kill": signal.SIGKILL, "abort": signal.SIGABRT}.get(self.fault.how, signal.SIGSTOP)
        if all(rank in ranks for rank in self.fault.ranks):
            for rank in self.fault.ranks:
                os.kill(ranks[rank], number)
            self.lost = now

    def _may_go_on(self) -> bool:
        """Whether to let the stopped ranks go on: once another has given them up, or where nobody waits for them."""
        if self.fault.place == "end":
            return HOWS[self.fault.how] is STOP and self.named is not None
        states = [stat_of(pid) for rank, pid in self.ranks().items() if rank not in self.fault.ranks]
        return self.fault.how == "continue" and any(state is None or state[0] in "ZX" for state in states)

    def wrong(self) -> list[str]:
        """What the user should not have seen, or did not see."""
        text, found = self.text, []
        if self.lost is None:
            return [f"nothing was lost (exit code {self.code})"]
        if self.ended is None:
            found.append(f"not ended after {END_WITHIN:g} s")
        elif self.ended - self.lost > END_WITHIN + self.slack:
            found.append(f"ended only after {self.ended - self.lost:.0f} s")
        if self.named is None and self.code != 0:
            found.append("the rank was not named")
        elif self.named is not None and self.named - self.lost > REPORT_WITHIN + self.slack:
            found.append(f"named only after {self.named - self.lost:.0f} s")
        how, at_the_end = HOWS[self.fault.how], self.fault.place == "end"
        expected = 0 if at_the_end and how.code == EXIT_RANK_LOST else how.code
        if text.count("Traceback") != how.tracebacks:
            found.append(f"{text.count('Traceback')} tracebacks")
        if self.fault.how == "continue" and not self.continued:
            found.append("the rank was not continued")
        if self.ended is not None and self.code != expected:
            found.append(f"exit code {self.code}, not {expected}")
        return found + [f"the output says {word!r}" for word in INNER if re.search(word, text)]

    def end(self) -> None:
        """End what is left of the job."""
        if self.ended is None:
            os.kill(self.pid, signal.SIGKILL)  # Linux ends its ranks
            os.waitpid(self.pid, 0)

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks there are."""
        if not self.cold:
            return {int(path.name[4:]): int(path.read_text() or 0) for path in self.folder.glob("pid-*")}
        found = {}
        for pid in children_of(self.pid):
            with contextlib.suppress(OSError, StopIteration):
                facts = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found[next(int(fact[5:]) for fact in facts if fact.startswith(b"RANK="))] = pid
        return found


INNER = (
    r"gloo", "Connection (closed|reset) by", "terminate called", r"\[W\d", r"\[E\d",
    "Segmentation", "core dumped", "its own output says why",
)  # fmt: skip
"""What is nobody's business but the library's."""


def names(text: str, fault: Fault) -> bool:
    """Whether all lost ranks are named."""
    told, said = HOWS[fault.how].told, text.replace("\n", " ")
    ranks = fault.ranks if HOWS[fault.how] is STOP else fault.ranks[:1]
    return all(re.search(told.replace("{rank}", str(rank)), said) for rank in ranks)


# --- many -------------------------------------------------------------------------------------------------------------


def draw(number: int, args: argparse.Namespace) -> Fault:
    """The fault of one try."""
    chance = random.Random(f"{args.seed}/{number}")
    count = {"one": 1, "two": 2, "all but one": args.ranks - 1}[args.who]
    ranks = tuple(sorted(chance.sample(range(args.ranks), count)))
    places = args.places.split(",")[number % len(args.places.split(","))] if args.each else args.places
    place, turn = ("", 1) if args.cold else draw_place(chance, args.how, places)
    return Fault(args.how, ranks, place, turn, chance.uniform(0, args.cold or 6.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=HOWS, default="stop")
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first try")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--who", choices=("one", "two", "all but one"), default="one")
    parser.add_argument("--places", default="", help=f"of {', '.join(PLACES)}; moments if empty between commas")
    parser.add_argument("--each", action="store_true", help="take the places in turn")
    parser.add_argument("--cold", type=float, default=0.0, help="start afresh; lost within so many seconds")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--keep", help="a folder for the output of tries that went wrong")
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="fullshard-lose-") as folder:
        return run(args, more, Path(folder))


def run(args: argparse.Namespace, more: list[str], folder: Path) -> int:
    if (pid := os.fork()) == 0:  # torch's threads must not have begun in the process that is forked
        make_folder(folder / "tiny", rows=200)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    left, under_way, done, bad = list(range(args.first, args.first + args.tries)), {}, 0, 0
    while left or under_way:
        while left and len(under_way) < args.jobs:
            number = left.pop(0)
            under_way[number] = one = Try(draw(number, args), folder / str(number), bool(args.cold))
            one.start(folder / "tiny", args.ranks, more)
        for number, one in list(under_way.items()):
            if not one.look():
                continue
            del under_way[number]
            one.end()
            wrong, done = one.wrong(), done + 1
            bad += bool(wrong)
            took = [f"{t - one.lost:.1f}" if t and one.lost else "-" for t in (one.named, one.ended)]
            print(f"{number:4d}  {one.fault!s:36s} named {took[0]:>5s} ended {took[1]:>5s} code {one.code}  "
                  f"{'; '.join(wrong) or 'ok'}  [{done - bad} of {done}]", flush=True)  # fmt: skip
            if args.keep and (wrong or args.keep.endswith("/")):
                Path(args.keep).mkdir(parents=True, exist_ok=True)
                (Path(args.keep) / f"{args.how}-{number}.log").write_text(f"{one.fault}\n{wrong}\n\n{one.text}")
            shutil.rmtree(one.folder, ignore_errors=True)
        time.sleep(0.05)
    print(f"{done - bad} of {done} tries as they should be")
    return bad != 0


if __name__ == "__main__":
    sys.exit(main())
