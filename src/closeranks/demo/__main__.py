"""`python -m closeranks.demo`: one rank of the demo. Parses, meets the others, trains twice."""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist

from closeranks.demo import digits, gpt
from closeranks.demo.training import say, train
from closeranks.world import init


def main() -> int:
    parser = argparse.ArgumentParser(prog="closeranks demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: a look")
    is_quick = parser.parse_args().quick
    world = init()
    try:
        torch.manual_seed(world.rank)  # Replicas start apart; wrapping gives all of them rank 0's.
        say(f"{world.size} worker{'s' if world.size > 1 else ''}, torch {torch.__version__}")
        are_equal = [train(task) for task in (digits.task(is_quick), gpt.task(is_quick))]
    finally:
        dist.destroy_process_group()
    return 0 if all(are_equal) else 1


if __name__ == "__main__":
    sys.exit(main())
