"""Checks that need torch and DeepSpeed only."""

from hybrid.doctor.core.groups import GROUPS
from hybrid.doctor.core.memory import MEMORY
from hybrid.doctor.core.numbers import NUMBERS
from hybrid.doctor.core.swap import SWAP

CORE = [*MEMORY, *GROUPS, *NUMBERS, *SWAP]
