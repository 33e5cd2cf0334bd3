"""Random numbers of a replay: the same for the same frame, in whichever worker, whatever was drawn before."""

import hashlib
import random

import numpy as np
import torch


def seed_generators(*of: object) -> None:
    """Set the default generators of `random`, numpy and torch, on every device, to what follows from these values."""
    seed = int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=4).digest(), "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes 0.1 ms, mostly for devices that are not there
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
