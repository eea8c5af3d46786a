"""Errors meant for the person who runs `hybrid`: each names the rule broken, the value and the fix."""

from __future__ import annotations


class HybridError(Exception):
    """Base of every error that the command line prints without a traceback."""


class ConfigError(HybridError):
    """The profile or its overrides break one or more rules; the message lists all of them."""


class SurroundingsError(ConfigError):
    """The machine, or a variable of the environment, keeps the run from starting; the message names it and the cure."""


class NotExact(ConfigError):
    """A model has a part that the trainer would not compute exactly; the message names it and the cure."""


class UnusableModel(ConfigError):
    """The model or tokenizer at `path`, which `key` of the profile names, cannot be used: why, and the fix."""

    def __init__(self, key: str, path: str, why: str, fix: str):
        super().__init__(key, path, why, fix)
        self.key, self.rule, self.fix = key, f"{key}: {path} is invalid: {why}", fix

    def __str__(self) -> str:
        return f"{self.rule}. {self.fix}"


class EndsProgram(HybridError):
    """A user's file ends the program when it is imported; the message names it and the cure."""


class PlacementError(HybridError):
    """The cluster cannot give the bundles the run needs; the message shows what each node offers."""


class WorkerDied(HybridError):
    """A role or engine process ended; the message names role, rank and node."""


class WorkerFailed(HybridError):
    """A call raised in a role or engine process; the message carries the remote traceback."""


class DeadlineExceeded(HybridError):
    """A wait passed its deadline; the message says who did not answer and what they were doing."""


class MemoryScheduleError(HybridError):
    """An illegal move of a tenant, or memory that did not fall after one left."""


class DataError(HybridError):
    """A data file or record is malformed; the message names file and line."""


class RewardError(HybridError):
    """A reward raised, hung, or returned something that is not one finite number per sample."""


class RolloutError(HybridError):
    """An engine generated with the wrong weights, or could not take new ones."""


class ExportError(HybridError):
    """The trained model is not where it should be; the message says where it is, or which disk lacked how much."""


class TrainingStopped(HybridError):
    """Training was ended on purpose: trainer and sampler disagree, or too many steps were skipped."""
