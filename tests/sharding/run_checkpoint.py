"""One of several processes: load a checkpoint, score, take a step and save.

    torchrun ... run_checkpoint.py FOLDER LOCAL_SIZE

FOLDER holds `plan.json` and `start`, a checkpoint; the process leaves its scores, and rank 0 the
checkpoints `after` and `async`, which must be the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).parent))

import small_net

from rankopt.jobs.shard_plan import read_plan
from rankopt.sharding.checkpoint import ShardedCheckpoint, training_state
from rankopt.sharding.distributed import shard_module
from rankopt.sharding.serving import serve_shards


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["LOCAL_WORLD_SIZE"] = sys.argv[2]
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % int(sys.argv[2]))
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    plan = read_plan(folder / "plan.json")
    own = small_net.NUM_ROWS // size
    inputs = small_net.rows(rank * own, (rank + 1) * own)
    start = ShardedCheckpoint(folder / "start")
    scores: dict[str, Any] = {}
    for sent_as in ("fp16", "bf16", "fp32"):
        sharded = shard_module(small_net.SmallNet(), plan, communication=sent_as)  # type: ignore[arg-type]
        start.load({"model": sharded.state_dict()})
        with torch.no_grad():
            scores[sent_as] = sharded(*inputs)
    served = serve_shards(small_net.SmallNet(), folder / "start", plan)
    with torch.no_grad():
        scores["int8"] = served(*small_net.rows(0, small_net.NUM_ROWS))
    torch.save(scores, folder / f"scores-{rank}.pt")
    if (folder / "optimizer").exists():
        start.load(training_state(sharded, sharded.fused_optimizer))
    else:
        sharded(*inputs).square().sum().backward()
    state = training_state(sharded, sharded.fused_optimizer, step=1)
    ShardedCheckpoint(folder / "after").save(state)
    background = ShardedCheckpoint(folder / "async")
    background.save_async(state)
    # What the step changes from here on must not reach the copy.
    sharded(*inputs).square().sum().backward()
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.add_(1.0)
    background.wait()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
