"""`RunConfig`: one run, whole."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from hybrid.config.algorithm import Algorithm, Reward
from hybrid.config.base import Section
from hybrid.config.sections import (
    Actor,
    Checkpoint,
    Cluster,
    Critic,
    Data,
    Logging,
    Memory,
    Model,
    Reference,
    Rollout,
    Train,
)


class RunConfig(Section):
    """A run. Made by `load_run`; `resolve` then replaces every `auto` and null that stands for a value found
    elsewhere."""

    cluster: Cluster = Cluster()
    """Machines: how many nodes and GPUs, and how to reach them."""
    model: Model
    """The model that is trained."""
    actor: Actor = Actor()
    """ZeRO stage, AdamW and schedule of the policy."""
    critic: Critic | None = None
    """ZeRO stage, AdamW and schedule of the value model; only with advantage gae."""
    reference: Reference | None = None
    """The frozen model that KL is measured against; only with kl_coef above 0."""
    reward: Reward = Reward()
    """Where scores come from: a function or a model."""
    rollout: Rollout = Rollout()
    """vLLM engines and how they sample."""
    algorithm: Algorithm = Algorithm()
    """Advantages, losses and KL."""
    train: Train
    """How long, in which portions."""
    data: Data
    """Prompts, labels and held-out evaluation."""
    memory: Memory = Memory()
    """What stays on a GPU between phases, and where the rest goes."""
    checkpoint: Checkpoint = Checkpoint()
    """What a run leaves behind."""
    logging: Logging = Logging()
    """Where a run writes, and what it shows."""

    profile_dir: Path = Field(default=Path("."), exclude=True)
    """Folder of the profile: relative paths are looked for there too."""
    profile: Path = Field(default=Path("run"), exclude=True)
    """The profile's file as it was given, for messages; its name without the ending is the first part of a run's name."""
    places: dict[str, str] = Field(default={}, exclude=True)
    """Where each key stands, `file:line` or the command line, for messages."""
    notes: tuple[str, ...] = Field(default=(), exclude=True)
    """What `resolve` chose and the user should know, one sentence each."""
    autos: tuple[str, ...] = Field(default=(), exclude=True)
    """Keys that were `auto`, of resolved configs: what a plan may choose anew."""

    @property
    def world_size(self) -> int:
        """GPUs of the run, and ranks of every role. Resolved configs only."""
        return self.cluster.num_nodes * self.cluster.gpus_per_node

    @property
    def uses_critic(self) -> bool:
        return self.algorithm.advantage == "gae"

    @property
    def uses_reference(self) -> bool:
        return self.algorithm.kl_coef > 0

    @property
    def uses_reward_model(self) -> bool:
        return self.reward.model is not None

    @property
    def uses_engines(self) -> bool:
        """False when recorded rollouts are replayed."""
        return self.rollout.replay is None

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles with one process per GPU, in the order in which they start."""
        used = {
            "actor": True,
            "critic": self.uses_critic,
            "reference": self.uses_reference,
            "reward": self.uses_reward_model,
        }
        return tuple(role for role, wanted in used.items() if wanted)

    @property
    def processes_per_gpu(self) -> int:
        """Processes that share a GPU: one of each role, and an engine's."""
        return len(self.roles) + self.uses_engines

    @property
    def samples_per_step(self) -> int:
        """Responses of a rollout."""
        return self.train.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps in one pass over a rollout."""
        return self.train.prompts_per_step // (self.train.prompts_per_update or self.train.prompts_per_step)

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps on a rollout, all epochs."""
        return self.updates_per_epoch * self.train.epochs

    @property
    def needs_old_logprobs(self) -> bool:
        """False when the training forward's own log-probs are the old ones: one optimizer step per rollout, no KL in the
        reward."""
        return self.updates_per_rollout > 1 or (self.uses_reference and self.algorithm.kl_in == "reward")

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the run: what learning-rate schedules count."""
        return self.updates_per_rollout * self.train.steps

    @property
    def critic_only_updates(self) -> int:
        """Optimizer steps at the start in which only the critic trains."""
        return self.updates_per_rollout * self.algorithm.critic_only_steps

    @property
    def uses_greedy_answers(self) -> bool:
        """Whether each prompt is answered greedily, too."""
        return self.algorithm.advantage == "remax"

    @property
    def distribution_is_cut(self) -> bool:
        """Whether the sampler's log-probs are those of fewer tokens than the trainer's."""
        return self.rollout.top_p < 1 or self.rollout.top_k > 0 or self.rollout.min_p > 0

    def sequences_at_once(self, sequences: int) -> int:
        """Of `sequences` to generate, those that an engine has at a time. Resolved configs only."""
        return min(self.rollout.max_num_seqs, -(-sequences // self.rollout.engines))

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence, prompt and response."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens


SECTIONS = tuple(name for name, field in RunConfig.model_fields.items() if not field.exclude)
