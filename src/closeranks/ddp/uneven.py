"""join(): ranks with fewer batches take part in the exchanges of those that still train.

A rank that has joined shadows what the others do in each of their iterations: the buffers of
their forward, the question whether the backward is an exchange, and the exchange itself, with
zeros and without touching its own gradients. At the end all take the model of one that trained
last. Knows the wrapper; must not know buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from closeranks.ddp.upkeep import Upkeep


class ShadowHook(JoinHook):
    """What a joined rank does while others train."""

    def __init__(self, ddp: Upkeep, divide_by_initial_world_size: bool) -> None:
        self._ddp = ddp
        ddp.divides_by_initial_size = divide_by_initial_world_size
        ddp.logger._set_uneven_input_join()
        super().__init__()

    def main_hook(self) -> None:
        """Shadow one iteration of the others, in the order of their forward and backward."""
        ddp = self._ddp
        ddp._check_and_sync_module_buffers()
        synced = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        # As in a forward: a local iteration is not followed by a broadcast of buffers.
        ddp.require_forward_param_sync = synced
        if synced:
            ddp._shadow_exchange()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks take the model of one that trained until the end."""
        self._ddp._sync_final_model(is_last_joiner)
