"""The seeds of a step: no random state is stored, every generator is seeded again before it is used."""

from __future__ import annotations

import hashlib
import random
from typing import Literal

import numpy as np
import torch


def reseed(seed: int, step: int, rank: int, use: Literal["rollout", "eval"]) -> None:
    """Seed the global generators of Python, numpy and torch, from which the engine and its draft sample."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}/{use}".encode()).digest()
    value = int.from_bytes(digest[:4])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)  # of all devices
