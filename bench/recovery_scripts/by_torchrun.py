"""The training of bench/recovery.py with torch's class and a checkpoint every 50 steps."""

import os
import sys
from pathlib import Path

from training import LR, Notes, batch_of, data, net

notes = Notes(sys.argv[1])

import torch  # noqa: E402 - the first note tells when the script began
import torch.distributed as dist  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

EVERY = 50

torch.set_num_threads(1)
# Through torchrun's own store, restarted ranks were handed addresses of dead ones.
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = f"file://{sys.argv[1]}/store-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
torch.manual_seed(0)
model = DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
checkpoint = Path(sys.argv[1]) / "checkpoint.pt"
begun = 0
if checkpoint.exists():
    found = torch.load(checkpoint)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    begun = found["step"]
samples = data()
notes.tell("ready", begun)
for step in range(begun, int(sys.argv[2])):
    x, y = batch_of(samples, step, rank, size)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    notes.tell("step", step)
    if rank == 0 and (step + 1) % EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        new = checkpoint.with_suffix(".new")
        torch.save(state | {"step": step + 1}, new)
        os.replace(new, checkpoint)
dist.destroy_process_group()
