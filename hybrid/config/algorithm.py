"""The sections of a profile that choose the mathematics: scores, advantages, losses and KL. Formulas, papers and when to
use what: hybrid/algorithms/README.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hybrid.config.base import Section
from hybrid.config.sections import NonNegative, Positive, PositiveFloat, Share, Text

Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
Interval = Annotated[tuple[float, float], Field(strict=False)]


class Reward(Section):
    """Where scores come from, a function or a reward model, exactly one of the two, and how they are shaped.

    In this order: weighted sum with `extra`, clip, normalise, weight of the source, overlong penalty, unfinished
    responses.
    """

    function: Text | None = None
    """`reasoning_gym` (the task's own scorer), `math_verify`, or `file.py:function`, called with a batch as
    `function(prompts, responses, labels, **columns) -> list[float]`, sync or async, in a process of its own. A parameter
    `token_ids` gets the token ids of the responses, with the end token."""
    batch: Literal["step", "group"] = "step"
    """What functions of a file are called with. `step`: all responses of a rollout at once, after generation. `group`: as
    prompts are done, while the engines go on with others; several calls a rollout, each with all samples of one or more
    prompts, in no fixed order. Take it when a score depends on no other prompt's responses: the scores are the same then.
    `reasoning_gym` and `math_verify` are always scored as with group."""
    model: Text | None = None
    """Folder or hub name of a transformers sequence-classification model with one output."""
    timeout_s: PositiveFloat = 60.0
    """Seconds that one call of a reward function may take."""
    processes: Positive = 1
    """Processes of each function of a file; each imports the file and keeps its state. With more than one, each gets a share of
    a call's prompts, with all their samples, at the same time as the others; scores stay in order."""
    keep_special_tokens: bool = False
    """Leave special tokens such as `<think>` in the text that rewards and samples.jsonl see, in training and evaluation; the end
    token never is. false: as transformers' skip_special_tokens. A replayed rollout has its recorded text."""
    batch_tokens: Positive = 16384
    """Tokens of a micro-batch of the reward model, per rank."""
    weight: Weight = 1.0
    """Weight of the function's or the model's score in the sum with `extra`."""
    extra: dict[Text, Weight] = Field(default_factory=dict)
    """More reward functions, each with its weight, such as `{rewards.py:format: 0.2}`: their weighted scores are added."""
    clip: Interval | None = None
    """Lowest and highest raw score, the sum that is; beyond, a score counts as the bound. null: off."""
    normalise: bool = False
    """Subtract the running mean of all scores so far and divide by their running standard deviation. Estimators that
    compare within a group subtract their own mean; for them this only scales."""
    source_field: Text | None = None
    """Column that names the source of a prompt, for `source_weights`; with dots into records, such as
    `entry.metadata.source_dataset` for a composite reasoning_gym task."""
    source_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Factor of the scores of prompts from each source; 1 for one that is not listed."""
    overlong_buffer: Positive | None = None
    """Tokens before max_new_tokens over which a penalty grows from 0 to overlong_factor (DAPO). null: off."""
    overlong_factor: PositiveFloat = 1.0
    """Largest overlong penalty."""
    unfinished_penalty: PositiveFloat | None = None
    """Taken from the score of a response that max_new_tokens cut. null: off."""
    unfinished_score: float | None = None
    """The score of a response that max_new_tokens cut, whatever it says. null: off."""


class Algorithm(Section):
    """Advantages, losses and KL; hybrid/algorithms/README.md has formulas and papers."""

    advantage: Literal[
        "gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "maxrl", "opo", "remax"
    ] = "group_norm"
    """How scores become advantages: `gae` is PPO with a critic, `group_norm` is GRPO."""
    gamma: Share = 1.0
    """Discount per token, for gae and reinforce."""
    lam: Share = 0.95
    """Lambda of gae: 1 trusts returns, 0 the critic."""
    dynamic_sampling: bool = False
    """Leave out prompts whose samples all score alike, which teach a group estimator nothing, and generate more in their place (DAPO).
    Prompts beyond the step's serve the next one. Not applied to replayed rollouts."""
    sampling_rounds: Positive = 5
    """Most times that dynamic sampling generates in a step; what is still missing is filled with prompts that it left
    out."""
    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    """Form of the policy loss."""
    clip_low: Share = 0.2
    """The ratio to the old policy is clipped at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio to the old policy is clipped at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss where the advantage is negative, as a multiple of it; ppo and gspo. null: off."""
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over tokens; mean over sequences of their token means; or the sum over sequences x max_new_tokens (Dr.
    GRPO). Always over the whole optimizer step, however it is cut."""
    correction: Literal["none", "tis", "icepop", "seq_mask"] = "none"
    """Weight for the difference between sampler and trainer, `exp(old - sampler)`: cut at correction_high (tis), 0
    outside the bounds per token (icepop) or for the whole response by its mean (seq_mask). With top_p, top_k or min_p
    the sampler's log-probs are those of fewer tokens, and the weight is biased towards less than 1."""
    correction_low: Annotated[float, Field(ge=0)] = 0.5
    """Lower bound of icepop and seq_mask."""
    correction_high: PositiveFloat = 2.0
    """Upper bound of the correction."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy, at the sampling temperature, that is taken from the policy loss. 0: no bonus."""
    entropy_metric: bool = True
    """Measure the policy's entropy in training."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference, with kl_target its first value. 0: no KL, no reference model."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL (Schulman 2020). In the loss k2 or k3: the gradient of k1 is 0 on average."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL enters: added to the policy loss, or taken from the token rewards."""
    kl_target: PositiveFloat | None = None
    """KL that the coefficient is steered to, in nats summed over a response (Ziegler et al. 2019). null: the
    coefficient is fixed."""
    kl_horizon: Positive = 10000
    """Responses over which the coefficient may change by a fifth."""
    kl_bound: PositiveFloat | None = 10.0
    """Bound of the KL to the reference, in nats summed over a response and averaged over the batch: beyond it the policy
    is elsewhere. Raise it for long answers, the sum grows with them. null: off."""
    kl_bound_action: Literal["stop", "warn"] = "stop"
    """What happens beyond kl_bound: the run stops, or says so each step."""
    value_clip: PositiveFloat | None = 0.2
    """Values are clipped to this distance from the old ones in the critic's loss. null: off."""
    critic_only_steps: NonNegative = 0
    """Steps at the start in which only the critic trains, so that the actor's first advantages mean something."""
    sampler_kl_bound: PositiveFloat | None = 0.1
    """Stop the run when the log-probs of engines and trainer differ by more than this, in nats, as the mean of the absolute
    difference over tokens: one of the two computes something else. null: off."""
