"""Every random number of a training as a function of what it is for, never of who draws it.

Each piece of work begins with the three generators that user code draws from (torch's, numpy's and
`random`) set from a seed of its own, derived from the job's seed and from the piece's name. So the
state of a generator never has to travel between workers.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive(seed: int, *names: int | str) -> int:
    """A seed of 63 bits for the piece of work with these names."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Set all generators that user code may draw from."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and not torch.cuda._is_in_bad_fork():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
