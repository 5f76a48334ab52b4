"""What is compared: torch's class, ours, and the bare module, each around the same weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from closeranks.ddp.wrapper import DistributedDataParallel


@dataclass(frozen=True)
class Variant:
    """One way to train a module on several ranks."""

    name: str
    wrapper: type[TorchDDP] | None  # None trains each rank alone: the least that a step can take
    as_view: bool = False

    def wrap(self, module: nn.Module) -> nn.Module:
        if self.wrapper is None:
            return module
        return self.wrapper(module, gradient_as_bucket_view=self.as_view)


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("no sync", None),
        Variant("torch", TorchDDP),
        Variant("ours", DistributedDataParallel),
        Variant("torch view", TorchDDP, as_view=True),
        Variant("ours view", DistributedDataParallel, as_view=True),
    )
}
