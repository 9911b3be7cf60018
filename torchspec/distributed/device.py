"""Choose between CPU and CUDA, and refuse to fall back to the CPU in silence."""

from __future__ import annotations

import os
import subprocess

import torch

from torchspec.errors import ConfigError


def choose_device_type() -> str:
    """Return "cuda" where torch can use a GPU, else "cpu".

    Raises:
        ConfigError: torch is a CUDA build and the driver lists a GPU, but torch cannot use it.
    """
    if torch.cuda.is_available():
        return "cuda"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if torch.version.cuda and not hidden and (driver := gpu_driver()):
        raise ConfigError(
            f"a GPU is here (NVIDIA driver {driver}), but torch {torch.__version__}, built for CUDA "
            f"{torch.version.cuda}, cannot use it: the driver is too old (CUDA 13.0 needs R580 or newer); update it, "
            f"or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )
    return "cpu"


def gpu_driver() -> str:
    """Return the version of the NVIDIA driver that lists a GPU; "" where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):  # no driver, or one that does not answer
        return ""
    return next(iter(asked.stdout.split()), "")
