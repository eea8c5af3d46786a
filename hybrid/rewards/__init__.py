"""Scores of responses: the user's function, the verifiers that come with hybrid."""

from hybrid.rewards.early import EarlyScores
from hybrid.rewards.function import RewardFunction
from hybrid.rewards.load import load_extra_rewards, load_reward, load_rewards
from hybrid.rewards.score import accuracy, score
from hybrid.rewards.shaping import shape, weighted_sum

__all__ = [
    "EarlyScores",
    "RewardFunction",
    "accuracy",
    "load_extra_rewards",
    "load_reward",
    "load_rewards",
    "score",
    "shape",
    "weighted_sum",
]
