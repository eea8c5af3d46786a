"""On one rank and one frozen batch our loss is TRL's GRPO loss, value and gradient."""

from __future__ import annotations

import tempfile

import pytest
import torch

from hybrid.roles.models import ModelOptions, load_policy
from hybrid.roles.objective import PolicyObjective, PolicyRow
from hybrid.roles.packing import Row, pack
from hybrid.roles.policy_step import policy_objective
from hybrid.roles.reduction import Totals

PROMPTS, LENGTHS, WIDTH = [3, 5], [4, 7, 1, 6], 7
BETA, LOW, HIGH = 0.07, 0.2, 0.28
OURS = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "constant"}
"""TRL's loss types and the reduction of ours that each is."""
NORMALIZERS = {"token_mean": sum(LENGTHS), "sequence_mean": len(LENGTHS), "constant": len(LENGTHS) * WIDTH}


@pytest.fixture(scope="module")
def batch():
    """Four responses to two prompts, an advantage each, and log-probs of an old policy and a reference near the model's own."""
    generator = torch.Generator().manual_seed(0)

    def ids(n):
        return torch.randint(5, 500, (n,), generator=generator).tolist()

    prompts = [ids(n) for n in PROMPTS]
    rows = [Row(i // 2, prompts[i // 2], ids(n)) for i, n in enumerate(LENGTHS)]
    noise = [[torch.randn(n, generator=generator) * 0.3 for n in LENGTHS] for _ in range(2)]
    return rows, torch.tensor([0.7, -0.7, 1.2, -1.2]), noise


@pytest.fixture(scope="module")
def policy(models_folder):
    return load_policy(ModelOptions(str(models_folder / "tiny-llama"), torch.float32, "sdpa"))


@pytest.fixture(scope="module")
def columns(policy, batch):
    """Old and reference log-probs of each row."""
    rows, _, noise = batch
    with torch.no_grad():
        own = policy(pack(rows, True), 1.0)[0].split(LENGTHS)
    return [[row + shift for row, shift in zip(own, shifts)] for shifts in noise]


@pytest.fixture(scope="module")
def trainer(models_folder, tmp_path_factory):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with pytest.MonkeyPatch.context() as patched:
        # The import of wandb, which is TRL's, makes two temporary folders that go when Python ends.
        patched.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("wandb")))
        from trl import GRPOConfig, GRPOTrainer

    path = models_folder / "tiny-llama"
    args = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=len(LENGTHS),
        num_generations=2,
        max_completion_length=WIDTH,
        beta=BETA,
        epsilon=LOW,
        epsilon_high=HIGH,
        use_bias_correction_kl=False,  # of DeepSeek-V3.2, not of GRPO
    )
    made = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


def theirs(trainer, batch, columns, loss_type, level):
    rows, advantages, _ = batch
    trainer.loss_type, trainer.importance_sampling_level = loss_type, level

    def stack(values, left=False):
        width = max(len(v) for v in values)
        padded = torch.zeros(len(values), width, dtype=torch.tensor(values[0]).dtype)
        mask = torch.zeros(len(values), width, dtype=torch.long)
        for line, v in enumerate(values):
            span = slice(width - len(v), None) if left else slice(len(v))
            padded[line, span], mask[line, span] = torch.as_tensor(v), 1
        return padded, mask

    prompt_ids, prompt_mask = stack([r.prompt for r in rows], left=True)
    completion_ids, completion_mask = stack([r.response for r in rows])
    old, ref = (stack([v.tolist() for v in column])[0] for column in columns)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": completion_mask.sum(),
    }
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return float(loss.detach()), trainer.model.model.embed_tokens.weight.grad.clone()


def ours(policy, batch, columns, reduction, kind):
    rows, advantages, _ = batch
    objective = PolicyObjective(
        kind=kind,
        reduction=reduction,
        clip_low=LOW,
        clip_high=HIGH,
        dual_clip=None,
        correction="none",
        correction_low=0.5,
        correction_high=2.0,
        entropy_coef=0.0,
        entropy_metric=True,
        kl_coef=BETA,
        kl_kind="k3",
        temperature=1.0,
        max_tokens=WIDTH,
        normalizer=float(NORMALIZERS[reduction]),
        sampler_bound=None,
    )
    old, ref = columns
    train = [
        PolicyRow(r, torch.full((len(r.response),), float(a)), o, o, k)
        for r, a, o, k in zip(rows, advantages, old, ref)
    ]
    packed = pack(rows, True)
    policy.zero_grad()
    loss = policy_objective(train, packed, *policy(packed, 1.0, with_entropy=True), objective, Totals())
    loss.backward()
    return float(loss.detach()), policy.hf.model.embed_tokens.weight.grad.clone()


@pytest.mark.parametrize(("loss_type", "level"), [*((t, "token") for t in OURS), ("grpo", "sequence")])
def test_the_loss_is_trls(trainer, policy, batch, columns, loss_type, level):
    kind = {"token": "ppo", "sequence": "gspo"}[level]
    value, gradient = ours(policy, batch, columns, OURS[loss_type], kind)
    expected, expected_gradient = theirs(trainer, batch, columns, loss_type, level)
    assert abs(expected) > 1e-3
    assert value == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)
