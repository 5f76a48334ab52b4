"""The training of bench/recovery.py with Ranks: `closeranks run -n 3 ours.py FOLDER STEPS`."""

import sys

from training import BATCH, LANES, LR, Notes, data, net

notes = Notes(sys.argv[1])

import torch  # noqa: E402 - the first note tells when the script began
from torch.nn.functional import cross_entropy  # noqa: E402

import closeranks as cr  # noqa: E402

ranks = cr.Ranks(lanes=LANES, seed=0)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
ranks.prepare(model, optimizer)
samples = data()
epochs = int(sys.argv[2]) * BATCH // len(samples)
notes.tell("ready", 0)
for step in ranks.steps(samples, batch_size=BATCH, epochs=epochs):
    for x, y in step:
        cross_entropy(model(x), y).backward()
        notes.tell("lane", step.number)
    optimizer.step()
    optimizer.zero_grad()
    notes.tell("step", step.number)
ranks.print("digest", ranks.digest())
