"""On a GPU: the same weights as torch's class, with one rank over NCCL and two over gloo.

Two ranks share one GPU where there is only one, which gloo allows and NCCL does not. Skipped where
there is no GPU. `python -m tests.gpu.test_one_gpu` runs it without pytest.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from closeranks import DistributedDataParallel
from tests.ranks import run_ranks

STEPS = 6
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def _perceptron() -> nn.Module:
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(512, 512), nn.ReLU())])


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (8, 8, 8)), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()
    )


def _attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (8, 64)), nn.TransformerEncoder(layer, 2))


MODELS: tuple[Callable[[], nn.Module], ...] = (_perceptron, _convolutions, _attention)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.3},
    {"device_ids": [0]},
    {"find_unused_parameters": True},
)


def _train(wrapper: Any, module: nn.Module, rank: int, options: dict[str, Any]) -> list[Any]:
    ddp = wrapper(module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        batch = torch.randn(16, 512, generator=generator).cuda()
        if step % 3 == 1:
            with ddp.no_sync():
                ddp(batch).square().mean().backward()
        ddp(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in module.parameters()]


def _compare(rank: int) -> int:
    """On a rank: every model with every option by both classes; how many were compared."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.use_deterministic_algorithms(True, warn_only=True)
    count = 0
    for make in MODELS:
        for options in OPTIONS:
            torch.manual_seed(3)
            module = make().cuda()
            twin = copy.deepcopy(module)
            ours = _train(DistributedDataParallel, module, rank, options)
            torchs = _train(TorchDDP, twin, rank, options)
            for a, b in zip(ours, torchs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, [a.numpy().tobytes() for a in ours])
            assert everyones.count(everyones[0]) == len(everyones), "replicas differ"
            count += 1
    return count


def _over_nccl(rank: int) -> int:
    torch.cuda.set_device(rank)
    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    return _compare(rank)


def _way(rank: int) -> str:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return DistributedDataParallel(nn.Linear(4, 4).cuda()).exchange


def test_two_ranks_train_as_torchs_class_does() -> None:
    expected = len(MODELS) * len(OPTIONS)
    assert run_ranks(2, _compare, deadline_s=150.0) == [expected, expected]


def test_one_rank_over_nccl_trains_as_torchs_class_does() -> None:
    assert run_ranks(1, _over_nccl, deadline_s=150.0) == [len(MODELS) * len(OPTIONS)]


def test_gradients_on_a_gpu_take_the_process_group() -> None:
    assert run_ranks(2, _way) == ["group: gloo", "group: gloo"]


if __name__ == "__main__":
    for test in (
        test_gradients_on_a_gpu_take_the_process_group,
        test_one_rank_over_nccl_trains_as_torchs_class_does,
        test_two_ranks_train_as_torchs_class_does,
    ):
        test()
