"""Checks that need a whole install: vLLM and Ray as well. Both are imported in a check's own process only."""

from hybrid.doctor.full.engine import ENGINE
from hybrid.doctor.full.loading import LOADING
from hybrid.doctor.full.training import TRAINING

FULL = [*LOADING, *ENGINE, *TRAINING]
