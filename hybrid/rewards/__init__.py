"""Scores from functions: the user's, reasoning-gym's, math-verify's. (Reward models are a role: `hybrid.roles.reward`.)"""

from hybrid.rewards.function import RewardFunction
from hybrid.rewards.load import load_rewards
from hybrid.rewards.score import accuracy, score

__all__ = ["RewardFunction", "accuracy", "load_rewards", "score"]
