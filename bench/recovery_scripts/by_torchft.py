"""The training of bench/recovery.py with torchft, one replica for each process.

FOLDER STEPS RANK, and the environment names the lighthouse. A replica that died is started again by
bench/recovery.py, as torchft leaves it to a scheduler.
"""

import sys
from datetime import timedelta

from training import LR, WORKERS, Notes, batch_of, data, net

notes = Notes(sys.argv[1])

import torch  # noqa: E402 - the first note tells when the script began
from torch.distributed import TCPStore  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(0)
rank = int(sys.argv[3])
inner = net()
adam = torch.optim.AdamW(inner.parameters(), lr=LR)


def load(state):
    inner.load_state_dict(state["model"])
    adam.load_state_dict(state["optimizer"])


store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=lambda: {"model": inner.state_dict(), "optimizer": adam.state_dict()},
    replica_id=f"replica-{rank}-",
    timeout=timedelta(seconds=10),
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
)
model = DistributedDataParallel(manager, inner)
optimizer = Optimizer(manager, adam)
samples = data()
notes.tell("ready", 0)
while manager.current_step() < int(sys.argv[2]):
    step = manager.current_step()
    x, y = batch_of(samples, step, rank, WORKERS)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    notes.tell("step" if manager.current_step() > step else "discarded", manager.current_step())
manager.shutdown()
