"""What every exchange must do, as functions of (exchange, world) that return digests and findings.

One start of ranks runs all of them. A case appends to `Notes` what it found wrong on this rank, and
the digest of every result, so that the test can compare ranks. Data are functions of the rank, so
every rank knows what all ranks give.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.exchange.base import Exchange
from closeranks.exchange.group import GroupExchange
from tests.process.exchange_ways import CPU

SIZES = (0, 1, 63, 64, 65, 4099, 1 << 20)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int32, torch.int64, torch.int8, torch.uint8)
NOT_GLOO = (torch.int16,)  # gloo cannot sum these
GLOO_WAYS = ("group", "hosts")  # what gloo cannot do cannot be done by them
_LONG = 1 << 20


@dataclass
class Notes:
    """What one rank has to report."""

    findings: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def expect(self, good: object, text: str) -> None:
        if not good:
            self.findings.append(text)

    def result(self, name: str, tensor: Tensor) -> None:
        """All ranks must have the same bits under this name."""
        assert name not in self.digests, f"two results are called {name}"
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        self.digests[name] = hashlib.blake2b(raw, digest_size=8).hexdigest()


@functools.cache
def _base() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(_LONG + 4096, generator=generator, dtype=torch.float64)


def given(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What a rank gives."""
    values = _base()[37 * rank : 37 * rank + size] * (1.0 + rank / 8)
    if dtype.is_complex:
        return torch.complex(values, values.flip(0)).to(dtype)
    return values.to(dtype) if dtype.is_floating_point else (values * 8).to(torch.int64).to(dtype)


def exact_sum(world: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum of what all ranks give, and of its magnitudes, in double precision."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    parts = [given(rank, size, dtype).to(wide) for rank in range(world)]
    return sum(parts[1:], parts[0]), sum((p.abs() for p in parts[1:]), parts[0].abs())


def _error_max(
    dtype: torch.dtype, world: int, total: Tensor, magnitude: Tensor, way: str
) -> Tensor:
    """Every addition rounds; in shared memory 16-bit types are added in float32, rounded once."""
    eps = torch.finfo(dtype).eps
    if dtype in (torch.bfloat16, torch.float16) and way not in GLOO_WAYS:
        return 0.5 * eps * total.abs() + world * torch.finfo(torch.float32).eps * magnitude + 1e-7
    return world * eps * magnitude + 1e-7


def sums(exchange: Exchange, world: int, notes: Notes, way: str) -> None:
    """Every dtype and size, resident and not, whole and times a scale."""
    dtypes = (*FLOATS, *COMPLEX, *INTEGERS, *(NOT_GLOO if way not in GLOO_WAYS else ()))
    for number, (dtype, size) in enumerate(itertools.product(dtypes, SIZES)):
        own = given(exchange.rank, size, dtype)
        resident = exchange.allocate([size], dtype, CPU)[0]
        whole = not (dtype.is_floating_point or dtype.is_complex)
        for scale in (1.0,) if whole else (1.0 / world, 1.0)[: 2 if size < _LONG else 1]:
            plain = own.clone()
            exchange.all_reduce(plain, scale).wait()
            for turn in range(2):  # the first use of a resident tensor is special
                resident.copy_(own)
                exchange.all_reduce(resident, scale).wait()
                notes.expect(
                    way == "hosts" or torch.equal(resident.view(-1), plain),
                    f"{dtype} {size} x{scale}: resident in turn {turn} and staged differ",
                )
            name = f"{dtype} {size} x{round(scale, 3)}"
            if name in notes.digests:  # with one rank all scales are 1
                continue
            # Across hosts what is resident and what is not are summed in different orders.
            results = {name: plain, f"{name}, resident": resident.view(-1)}
            for name, result in list(results.items())[: 2 if way == "hosts" else 1]:
                notes.result(name, result)
                if number % world == exchange.rank:  # all have the same bits: one judges them
                    total, magnitude = exact_sum(world, size, dtype)
                    _judge(result, total * scale, magnitude * scale, notes, name, way, world)


def _judge(
    got: Tensor, total: Tensor, magnitude: Tensor, notes: Notes, name: str, way: str, world: int
) -> None:
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        notes.expect(torch.equal(got, total.to(torch.int64).to(got.dtype)), f"{name}: wrong sum")
        return
    kind = got.real.dtype if got.dtype.is_complex else got.dtype
    error = (got.to(total.dtype) - total).abs()
    excess = error - _error_max(kind, world, total, magnitude, way)
    notes.expect(
        not (excess > 0).any(), f"{name}: off by {error.max().item() if len(error) else 0}"
    )


def equal_to_gloo(exchange: Exchange, world: int, notes: Notes, way: str) -> None:
    """Two ranks: the same bits as gloo. NaN and Inf: as gloo has them, whatever the ranks."""
    group = GroupExchange(dist.distributed_c10d._get_default_group())
    if world == 2:
        for size in (1, 65, 4099, _LONG):
            ours = given(exchange.rank, size, torch.float32)
            theirs = ours.clone()
            exchange.all_reduce(ours, 0.5).wait()
            group.all_reduce(theirs, 0.5).wait()
            notes.expect(torch.equal(ours, theirs), f"float32 {size}: other bits than gloo's")
    odd = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0]
    for dtype in FLOATS:
        for shift in range(len(odd)):
            values = [odd[(i * (1 + exchange.rank) + shift) % len(odd)] for i in range(130)]
            ours = torch.tensor(values, dtype=dtype)
            theirs = ours.clone()
            exchange.all_reduce(ours).wait()
            group.all_reduce(theirs).wait()
            same = torch.equal(ours.nan_to_num(7e3, 8e3, 9e3), theirs.nan_to_num(7e3, 8e3, 9e3))
            notes.expect(same, f"{dtype}: NaN and Inf are not as gloo has them")
            notes.result(f"{dtype} odd {shift}", ours)


def layouts(exchange: Exchange, world: int, notes: Notes, way: str) -> None:
    """Tensors that are not one piece of memory, and views of resident ones."""
    total = exact_sum(world, 60, torch.float32)[0].float().view(6, 10)
    own = given(exchange.rank, 60, torch.float32).view(6, 10)
    padded = torch.zeros(6, 30)
    resident = exchange.allocate([120], torch.float32, CPU)[0]
    resident.zero_()
    shapes: dict[str, Tensor] = {
        "transposed": own.t().contiguous().t(),
        "the front of a resident": resident[:60].view(6, 10),
        "the back of a resident": resident[60:].view(6, 10),
        "of four dimensions": torch.zeros(1, 6, 1, 10).squeeze(),
    }
    if way not in GLOO_WAYS:  # gloo takes only what is dense
        shapes["with gaps"] = padded[:, ::3]
    for name, tensor in shapes.items():
        tensor.copy_(own)
        exchange.all_reduce(tensor).wait()
        notes.expect(torch.allclose(tensor, total, rtol=1e-5, atol=1e-5), f"{name}: wrong sum")
        notes.result(name, tensor)
    notes.expect(not padded[:, 1::3].any(), "what lies between was written")
    needs_grad = own.clone().requires_grad_(True)
    with torch.no_grad():
        exchange.all_reduce(needs_grad).wait()
    notes.expect(torch.allclose(needs_grad, total, rtol=1e-5, atol=1e-5), "requires_grad: wrong")


def maxima(exchange: Exchange, world: int, notes: Notes, way: str) -> None:
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.float32):
        for size in SIZES if dtype is torch.int32 else SIZES[:-1]:
            tensor = given(exchange.rank, size, dtype)
            exchange.all_max(tensor).wait()
            parts = [given(rank, size, dtype) for rank in range(world)]
            wanted = functools.reduce(torch.maximum, parts)
            notes.expect(torch.equal(tensor, wanted), f"all_max {dtype} {size}: wrong")


def broadcasts(exchange: Exchange, world: int, notes: Notes, way: str) -> None:
    kinds = (*FLOATS, *INTEGERS, *(() if way in GLOO_WAYS else (*COMPLEX, torch.bool, *NOT_GLOO)))
    for dtype in kinds:
        for size in SIZES if dtype is torch.float32 else SIZES[:-1]:
            for source in {0, world - 1}:
                tensor = given(exchange.rank, size, dtype)
                exchange.broadcast(tensor, source).wait()
                wanted = given(source, size, dtype)
                notes.expect(torch.equal(tensor, wanted), f"broadcast {dtype} {size}: wrong")
    shared = given(exchange.rank, 60, torch.float32).view(6, 10).t()
    exchange.broadcast(shared, 0).wait()
    notes.expect(torch.equal(shared, given(0, 60, torch.float32).view(6, 10).t()), "views: wrong")


def under_way_at_once(exchange: Exchange, world: int, notes: Notes, way: str) -> None:
    """Many collectives of all kinds are started, and waited for in several orders."""
    resident = exchange.allocate([7, 4099, 0, 300_001], torch.float32, CPU)
    for turn, order in enumerate(_orders(9)):
        tensors: list[Tensor] = []
        pending = []
        for number in range(9):
            size = (7, 4099, 300_001)[number % 3]
            tensor = resident[number // 3] if number % 4 == 0 else torch.empty(size)
            tensor.copy_(given(exchange.rank, tensor.numel(), torch.float32))
            tensors.append(tensor)
            if number % 3 == 2 and number % 4:
                pending.append(exchange.broadcast(tensor, number % world))
            elif number % 5 == 3:
                pending.append(exchange.all_max(tensor))
            else:
                pending.append(exchange.all_reduce(tensor, 0.5))
        for number in order:
            pending[number].wait()
        for number, tensor in enumerate(tensors):
            notes.result(f"turn {turn}, number {number}", tensor)
            if number % 3 != 2 and number % 5 != 3:
                wanted = exact_sum(world, tensor.numel(), torch.float32)[0] * 0.5
                close = torch.allclose(tensor.double(), wanted, rtol=1e-4, atol=1e-4)
                notes.expect(close, f"turn {turn}, number {number}: wrong sum")


def _orders(count: int) -> Iterator[list[int]]:
    yield list(range(count))
    yield list(reversed(range(count)))
    yield [(number * 4 + 2) % count for number in range(count)]


CASES: tuple[Callable[[Exchange, int, Notes, str], None], ...] = (
    sums,
    equal_to_gloo,
    layouts,
    maxima,
    broadcasts,
    under_way_at_once,
)
