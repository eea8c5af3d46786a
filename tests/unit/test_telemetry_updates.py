"""One step's figures from those of its updates."""

from hybrid.telemetry.updates import over_updates


def test_means_maxima_and_last_values():
    updates = [
        {"loss/policy": 1.0, "policy/ratio_max": 3.0, "lr/actor": 0.1, "grad_norm/actor": 2.0},
        {"loss/policy": 3.0, "policy/ratio_max": 2.0, "lr/actor": 0.2, "grad_norm/actor": None, "kl/reference": None},
    ]
    assert over_updates(updates) == {
        "loss/policy": 2.0,
        "policy/ratio_max": 3.0,
        "lr/actor": 0.2,
        "grad_norm/actor": 2.0,
        "kl/reference": None,
    }
