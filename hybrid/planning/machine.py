"""What predictions know about the machine."""

from __future__ import annotations

from hybrid.config import RunConfig
from hybrid.planning.plan import Predict, remembering


def predictor(cfg: RunConfig) -> Predict:
    """Predictions for the machine that a resolved `cfg` asks for; each model is looked at once."""
    from hybrid.planning.predict import MachineFacts, predict

    facts = MachineFacts()
    return remembering(lambda each: predict(each, facts))
