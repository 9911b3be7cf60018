"""What a run prints: one line a step, and what it left at the end."""

from __future__ import annotations

import json
from pathlib import Path


def console_line(step: int, steps: int, values: dict[str, float], seconds_left: float) -> str:
    """One line a step.

    Example:
        step  12/80 | reward 0.41 | policy +0.012 | draft 0.83 | tau 2.91 | rollout 5.1k tok/s | ...
    """
    minutes, seconds = divmod(round(seconds_left), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"reward {values['reward/mean']:.3f}",
        f"policy {values['policy/loss']:+.3f}",
    ]
    if "draft/loss" in values:
        parts.append(f"draft {values['draft/loss']:.3f}")
    if "rollout/tau" in values:
        parts.append(f"tau {values['rollout/tau']:.2f}")
    parts += [
        f"rollout {_thousands(values['perf/rollout_tokens_per_s'])} tok/s",
        f"train {_thousands(values['perf/train_tokens_per_s'])} tok/s",
        f"wait {values['perf/wait_s']:.1f}s",
        f"mem {values['perf/memory_gb']:.1f}GB",
        f"eta {hours}h{minutes:02}" if hours else f"eta {minutes}m{seconds:02}",
    ]
    return " | ".join(parts)


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def farewell(folder: Path, plots: list[Path], num_draft_tokens: int, method: str) -> str:
    """Return what a finished run has left, and how to serve it.

    Args:
        num_draft_tokens: 0 without a draft.
        method: vLLM's name of the draft's speculative method.
    """
    lines = [
        f"metrics     {folder / 'metrics.jsonl'}",
        f"TensorBoard tensorboard --logdir {folder / 'tensorboard'}",
        *(f"plot        {plot}" for plot in plots),
        f"serve       vllm serve {folder / 'policy'}",
    ]
    if num_draft_tokens:
        spec = {
            "method": method,
            "model": str(folder / "draft"),
            "num_speculative_tokens": num_draft_tokens,
            "draft_sample_method": "probabilistic",
        }
        # vLLM's CPU backend needs our patches (rollout/vllm/cpu_patches.py) to sample rightly while speculating.
        lines.append(f"  on a GPU  ... --speculative-config '{json.dumps(spec)}'")
    return "\n".join(lines)
