"""A script that ends in the way its first argument says; every process leaves its pid, and its children's, in a folder.

No torch in here, so that starting it is a matter of milliseconds.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

how, folder = sys.argv[1], Path(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
(folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
print(f"rank {rank} of {os.environ['WORLD_SIZE']}, attempt {attempt}", flush=True)


def leave_when_all_are_here(*_: object) -> None:
    (folder / f"saved-{rank}").touch()
    time.sleep(0.2 * rank)  # ranks do not end at the same moment
    sys.exit(75)


def wait(seconds: float = 60) -> None:
    (folder / f"ready-{rank}").touch()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)


if how.startswith("crash") and attempt == 0:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash of all":
        sys.exit(1)
    wait()
elif how == "lost" and attempt == 0:
    from fullshard.config.errors import RankLostError

    if rank == 1:
        sys.exit(3)
    time.sleep(0.5)
    raise RankLostError("rank 0 cannot continue in step 7: rank 1 has exited", "step 7")
elif how.endswith("outside the engine"):
    import torch
    import torch.distributed as dist

    from fullshard.fsdp import FSDPv2
    from tests.fsdp.programs import mesh_for

    model = FSDPv2(torch.nn.Linear(8, 8), mesh_for("FULL_SHARD"))
    model(torch.ones(2, 8)).sum().backward()
    for turn in range(10_000):  # a metric's sum, of which the watch knows nothing
        if rank == 1 and turn == 200:
            os.kill(os.getpid(), signal.SIGKILL if how.startswith("killed") else signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))
elif how == "stopped":
    (folder / f"stopped-{rank}").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
elif how == "fail":
    sys.exit(7 if rank == 1 else 0)
elif how == "preempted":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave_when_all_are_here)
    wait()
elif how == "preempted by itself":
    leave_when_all_are_here()
elif how == "deaf":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: (folder / f"heard-{rank}").touch())
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / f"pid-child-{rank}").write_text(str(child.pid))
    wait()
elif how == "joined":
    from fullshard.distributed import runtime

    runtime.use_spmd()
elif how == "stopped in the start":
    from fullshard.distributed import runtime

    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    runtime.use_spmd()
elif how.startswith("refused in the start of rank"):
    from fullshard.config.errors import ConfigError
    from fullshard.distributed import runtime

    if rank == int(how[-1]):
        raise ConfigError("there is no model in /models on this machine")
    runtime.use_spmd()
elif how == "with children":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / f"pid-child-{rank}").write_text(str(child.pid))
    (folder / f"port-{rank}").write_text(os.environ["MASTER_PORT"])
    (folder / f"secret-{rank}").write_text(os.environ.get("FULLSHARD_JOB_SECRET", ""))
    (folder / f"ready-{rank}").touch()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait()
elif how == "mistaken":
    from fullshard.config.errors import MeshError

    raise MeshError("3 devices do not fill a mesh of shape (2, 2)")
elif how == "cores":
    (folder / f"cores-{rank}").write_text(str(sorted(os.sched_getaffinity(0))))
    (folder / f"threads-{rank}").write_text(os.environ["OMP_NUM_THREADS"])
