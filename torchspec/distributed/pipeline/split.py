"""Which layers each pipeline stage has, and which taps it therefore makes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from torchspec.errors import ConfigError


def split_layers(layers: int, schedule: str, ranks: int, layers_per_stage: Sequence[int] = ()) -> list[range]:
    """The layers of each stage; stages that get one more than others come first, as the last has the head.

    Raises:
        ConfigError: `layers_per_stage` does not fit, or there are more stages than layers.
    """
    stages = len(layers_per_stage) or ranks * (2 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 1)
    if stages > layers:
        raise ConfigError(f"parallel.pp: {stages} stages need as many layers, the policy has {layers}")
    least, more = divmod(layers, stages)
    sizes = list(layers_per_stage) or [least + (stage < more) for stage in range(stages)]
    if sum(sizes) != layers:
        raise ConfigError(
            f"parallel.layers_per_stage = {sizes} adds up to {sum(sizes)}, the policy has {layers} layers"
        )
    ends = list(itertools.accumulate(sizes, initial=0))
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def tap_names(split: Sequence[range], aux_layers: Collection[int]) -> dict[int, list[int | str]]:
    """Which taps each stage makes: "embeds", aux layers by their id, "final"; stages with none are left out.

    Example: tap_names([range(0, 2), range(2, 4)], (2, 4)) == {0: ["embeds"], 1: [2, 4, "final"]}
    """
    last = len(split) - 1
    names: dict[int, list[int | str]] = {}
    for stage, ids in enumerate(split):
        made: list[int | str] = ["embeds"] if stage == 0 else []
        made += [i for i in aux_layers if i in ids or (stage == last and i == ids.stop)]
        made += ["final"] if stage == last else []
        if made:
            names[stage] = made
    return names
