"""Bands of a memory chart: their order, names, colours and patterns.

Colour says the role (Okabe & Ito's palette, told apart by colour-blind readers), pattern says the part, so that either is enough with the
legend, and a print in black and white can be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ROLE_COLOURS = {
    "rollout": "#56B4E9",
    "actor": "#E69F00",
    "critic": "#009E73",
    "reference": "#CC79A7",
    "reward": "#F0E442",
}
OTHER_COLOUR = "#D55E00"
PART_PATTERNS = {"weights": "solid", "gradients": "dots", "optimizer": "diagonal", "kv_cache": "cross"}

WORKING, OVERHEAD = "working", "overhead"


@dataclass(frozen=True)
class Band:
    """`key` is a tenant's "role/part", or `working` or `overhead`. `pattern`: solid, dots, diagonal, cross or lines."""

    key: str
    label: str
    colour: str
    pattern: str

    @property
    def fill_id(self) -> str:
        return "fill-" + "".join(c if c.isalnum() else "-" for c in self.key)


def bands(tenants: Iterable[str]) -> tuple[Band, ...]:
    """Bands from the bottom up: processes' rest, tenants by role, and on top what phases work with."""
    order = {role: i for i, role in enumerate(ROLE_COLOURS)}
    names = sorted(dict.fromkeys(tenants), key=lambda name: order.get(name.split("/")[0], len(order)))
    middle = [
        Band(
            name,
            name.replace("kv_cache", "KV cache"),
            ROLE_COLOURS.get(name.split("/")[0], OTHER_COLOUR),
            PART_PATTERNS.get(name.split("/", 1)[-1], "solid"),
        )
        for name in names
    ]
    return (
        Band(OVERHEAD, "processes at rest", "#A6A6A6", "solid"),
        *middle,
        Band(WORKING, "work of the phase", "#D9D9D9", "lines"),
    )
