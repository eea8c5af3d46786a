"""One step's figures from those of its updates."""

from __future__ import annotations

from collections.abc import Sequence

LAST = ("lr/actor", "lr/critic", "train/skipped_steps")
LARGEST = ("sampler/logprob_diff_max", "policy/ratio_max")


def over_updates(updates: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Mean over the updates that have a figure; the last where it counts or names a state, the largest where it is a maximum."""
    result: dict[str, float | None] = {}
    for key in dict.fromkeys(key for update in updates for key in update):
        values = [update[key] for update in updates if update.get(key) is not None]
        if not values:
            result[key] = None
        elif key in LAST:
            result[key] = values[-1]
        elif key in LARGEST:
            result[key] = max(values)
        else:
            result[key] = sum(values) / len(values)
    return result
