"""Scores of responses: the user's function, the verifiers that come with hybrid. Imports no torch: shaping is asked for by its name."""

from hybrid.rewards.early import EarlyScores
from hybrid.rewards.function import RewardFunction
from hybrid.rewards.load import (
    Functions,
    check_columns,
    load_extra_rewards,
    load_reward,
    load_rewards,
    started_functions,
)
from hybrid.rewards.score import accuracy, score

__all__ = [
    "EarlyScores",
    "Functions",
    "RewardFunction",
    "accuracy",
    "check_columns",
    "load_extra_rewards",
    "load_reward",
    "load_rewards",
    "score",
    "started_functions",
]
