"""Training scripts for tests of Ranks: each is what a user would write, and says how it ended.

A script takes the class to train with, Ranks or its naive twin, so that both do the same.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, TensorDataset

from tests.workers import pace

made: list[Any] = []  # the plain loops of this process


def make(naive: bool, **options: Any) -> Any:
    """The object under test, or its twin."""
    from closeranks.lanes.naive import NaiveRanks
    from closeranks.lanes.ranks import Ranks

    if naive:
        options.pop("checkpoint", None)
        options.pop("every", None)
        made.append(NaiveRanks(**options))
        return made[-1]
    return Ranks(**options)


def points_and_labels(count: int, width: int, classes: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    y = (x @ torch.randn(width, classes, generator=generator)).argmax(1)
    return TensorDataset(x, y)


def report(ranks: Any, **more: Any) -> dict[str, Any]:
    return {"digest": ranks.digest(), "rank": ranks.rank} | more


def mlp(naive: bool = False, lanes: int = 8, epochs: int = 2, **options: Any) -> dict[str, Any]:
    """Dropout, AdamW, a last batch that is smaller, an evaluation in between."""
    ranks = make(naive, lanes=lanes, **options)
    model = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 5))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    ranks.prepare(model, optimizer)
    train, test = points_and_labels(203, 12, 5), points_and_labels(77, 12, 5, seed=2)
    for step in ranks.steps(train, batch_size=32, epochs=epochs):
        for x, y in step:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        pace()
        # Not in a list here: a worker that was overtaken has not seen every step.
        ranks.state["last"] = step.values["loss"]
        if step.number % 5 == 0:
            inside = ranks.evaluate(test, 32, lambda batch: _hits(model, batch))
            ranks.print(f"step {step.number}: {step.values['loss']:.6f}, {inside['hit']}")
    totals = ranks.evaluate(test, 16, lambda batch: _hits(model, batch))
    ranks.print(totals["hit"], totals["seen"], ranks.state["last"])
    return report(ranks, totals=totals, last=ranks.state["last"])


def _hits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    x, y = batch
    return {"hit": (model(x).argmax(1) == y).sum(), "seen": len(x)}


def conv(naive: bool = False, lanes: int = 8, **options: Any) -> dict[str, Any]:
    """BatchNorm, momentum, channels that are last in memory."""
    ranks = make(naive, lanes=lanes, **options)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 3 * 3, 4),
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    ranks.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(90, 1, 8, 8, generator=generator)
    train = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long() + 2 * (x[:, 0, 0, 0] > 0).long())
    for step in ranks.steps(train, batch_size=24, epochs=3):
        for images, y in step:
            loss = functional.cross_entropy(model(images), y)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        pace()
    return report(ranks)


class Characters(nn.Module):
    """A small transformer over characters."""

    def __init__(self, kinds: int = 20, width: int = 16, length: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(kinds, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, 0.1, batch_first=True) for _ in range(2)
        )
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False
        )
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(width, kinds)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.embed(text) + self.place
        for block in self.blocks:
            hidden = block(hidden, self.mask, is_causal=True)
        return self.out(hidden)


def gpt(naive: bool = False, lanes: int = 8, **options: Any) -> dict[str, Any]:
    """Dropout, clipping, a cosine schedule, unused parameters, weights by tokens."""
    ranks = make(naive, lanes=lanes, **options)
    model = Characters()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    ranks.prepare(model, optimizer, scheduler)
    text = torch.randint(0, 20, (60, 13), generator=torch.Generator().manual_seed(5))
    for step in ranks.steps(
        TensorDataset(text), 16, epochs=2, weight=lambda batch: int((batch[0] > 3).sum())
    ):
        for (tokens,) in step:
            logits = model(tokens[:, :-1])
            wanted = tokens[:, 1:].masked_fill(tokens[:, :-1] <= 3, -100)
            loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            loss.backward()
            step.log(loss=loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        ranks.state["norms"] = [*ranks.state.get("norms", []), float(norm)]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        pace()
    return report(ranks, norms=ranks.state["norms"])


def gan(naive: bool = False, lanes: int = 8, epochs: int = 3, **options: Any) -> dict[str, Any]:
    """Two phases in a step, with an optimizer each."""
    ranks = make(naive, lanes=lanes, **options)
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    judge = nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
    of_maker = torch.optim.Adam(maker.parameters(), 1e-3)
    of_judge = torch.optim.Adam(judge.parameters(), 2e-3)
    ranks.prepare(maker, judge, of_maker, of_judge)
    real = torch.randn(58, 3, generator=torch.Generator().manual_seed(7)) + 2.0
    for step in ranks.steps(TensorDataset(real), 16, epochs=epochs):
        for (x,) in step:
            fake = maker(torch.randn(len(x), 4)).detach()
            loss = functional.softplus(-judge(x)).mean() + functional.softplus(judge(fake)).mean()
            loss.backward()
            step.log(judge=loss)
        of_judge.step()
        of_judge.zero_grad()
        for (x,) in step:
            loss = functional.softplus(-judge(maker(torch.randn(len(x), 4)))).mean()
            loss.backward()
            step.log(maker=loss)
        of_maker.step()
        of_maker.zero_grad()
        of_judge.zero_grad()
        pace()
        if step.number == 7:
            ranks.state["seen"] = ranks.evaluate(TensorDataset(real), 16, _count)["seen"]
    return report(ranks, seen=ranks.state["seen"])


def _count(batch: list[Tensor]) -> dict[str, int]:
    return {"seen": len(batch[0])}


class Augmented(Dataset[tuple[Tensor, int]]):
    """Draws from all three generators."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.full((6,), index / 50) + 0.1 * torch.randn(6)
        x = x + 0.1 * float(np.random.randn()) + 0.1 * random.random()
        return x, index % 3


def augmented(naive: bool = False, lanes: int = 8, **options: Any) -> dict[str, Any]:
    """Random numbers in the dataset and around it; gradients added up over two steps."""
    more = {"num_workers": options.pop("num_workers")} if "num_workers" in options else {}
    ranks = make(naive, lanes=lanes, **options)
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ranks.prepare(model, optimizer)
    for step in ranks.steps(Augmented(), 12, epochs=2, **more):
        for x, y in step:
            noise = 0.01 * (random.random() + np.random.rand())
            loss = functional.cross_entropy(model(x.double()) + noise + torch.rand(1), y)
            (0.5 * loss).backward(retain_graph=True)
            (0.5 * loss).backward()
            step.log(loss=loss)
        if step.number % 2:
            optimizer.step()
            optimizer.zero_grad()
        ranks.state["noise"] = ranks.state.get("noise", 0.0) + random.random() + np.random.rand()
        pace()
    return report(ranks, noise=ranks.state["noise"])


def accumulated(naive: bool = False, lanes: int = 8, **options: Any) -> dict[str, Any]:
    """Gradients of three batches for each step of the optimizer; an average of the weights."""
    ranks = make(naive, lanes=lanes, **options)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 5))
    smooth = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20)
    ranks.prepare(model, smooth, optimizer, scheduler)
    train, test = points_and_labels(107, 12, 5), points_and_labels(50, 12, 5, seed=2)
    for step in ranks.steps(train, batch_size=13, epochs=2):
        for x, y in step:
            loss = functional.cross_entropy(model(x), y) / 3
            loss.backward()
            step.log(loss=3 * loss)
        pace()
        if step.number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            smooth.update_parameters(model)
        if step.number == 8:
            ranks.state["inside"] = ranks.evaluate(test, 16, lambda batch: _hits(smooth, batch))
    totals = ranks.evaluate(test, 16, lambda batch: _hits(smooth, batch))
    return report(ranks, totals=totals, inside=ranks.state["inside"])


SCRIPTS = {f.__name__: f for f in (mlp, conv, gpt, gan, augmented, accumulated)}
