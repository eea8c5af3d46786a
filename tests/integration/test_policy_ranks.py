"""The actor's step does not depend on how its batch is cut: 1, 2 or 4 micro-batches, 1 or 2 ranks, ZeRO 0 to 3. No Ray."""

from __future__ import annotations

import pytest

from tests.integration.ranks import run_ranks
from tests.tiny_architectures import make_tiny_architecture

STAGES, MICROS, WORLDS = (0, 1, 2, 3), (1, 2, 4), (1, 2)
LENGTHS = [3, 9, 1, 6, 4, 2, 8, 5]
REDUCTIONS = {"token_mean": sum(LENGTHS), "sequence_mean": len(LENGTHS), "constant": len(LENGTHS) * 9}


def _rows():
    import torch

    from hybrid.roles.objective import PolicyRow
    from hybrid.roles.packing import Row

    generator = torch.Generator().manual_seed(0)
    rows = []
    for i, n in enumerate(LENGTHS):
        response = torch.randint(5, 500, (n,), generator=generator).tolist()
        columns = [torch.randn(n, generator=generator) * 0.3 - shift for shift in (0.0, 6.3, 6.3, 6.3)]
        rows.append(PolicyRow(Row(i // 2, [1, 7 + i // 2, 9], response), *columns))
    return rows


def _steps(rank, world, port, model, folder, stages=STAGES, all_micros=MICROS):
    """One step from the same weights for each (stage, micro-batches, reduction): metrics and weights after it."""
    import os

    import torch

    from hybrid.roles.actor import ActorWorker
    from hybrid.roles.models import ModelOptions
    from hybrid.roles.objective import PolicyObjective
    from hybrid.roles.weights import WeightBuckets
    from hybrid.roles.zero import ZeroOptions

    os.environ["DS_ACCELERATOR"] = "cpu"
    worker = ActorWorker(
        "actor", rank, world, "here", "cpu", 1, 120.0, tier="file", swap_dir=folder, node_ranks=list(range(world))
    )
    if rank == 0:
        from torch import distributed as dist

        worker.store = dist.TCPStore("127.0.0.1", port, world, is_master=True, wait_for_workers=False)
    worker.join("127.0.0.1", port)
    rows = _rows()[rank * len(LENGTHS) // world : (rank + 1) * len(LENGTHS) // world]
    results = {}
    for stage in stages:
        for micros in all_micros:
            for reduction, normalizer in REDUCTIONS.items():
                if reduction != "token_mean" and (stage, micros) not in ((2, 1), (2, 4)):
                    continue
                worker.load(
                    ModelOptions(model, torch.float32, "sdpa"),
                    ZeroOptions(stage, torch.float32, (0.9, 0.95), 1e-8, 0.0, 1.0),
                )
                objective = PolicyObjective(
                    kind="ppo",
                    reduction=reduction,
                    clip_low=0.2,
                    clip_high=0.28,
                    dual_clip=3.0,
                    correction="tis",
                    correction_low=0.5,
                    correction_high=1.2,
                    entropy_coef=0.05,
                    entropy_metric=True,
                    kl_coef=0.1,
                    kl_kind="k3",
                    temperature=0.9,
                    max_tokens=9,
                    normalizer=float(normalizer),
                    sampler_bound=None,
                )
                size = len(rows) // micros
                cut = [rows[i : i + size] for i in range(0, len(rows), size)]
                step = worker.train(cut, objective, 1e-3)
                buckets = WeightBuckets(worker.model.module.hf, stage, 10**6)
                weights = torch.cat([t.flatten().clone() for bucket in buckets for _, t in bucket])
                results[stage, micros, reduction] = (step.metrics, weights.numpy())
    return results


@pytest.fixture(scope="module")
def results(models_folder, tmp_path_factory):
    model, folder = str(models_folder / "tiny-llama"), str(tmp_path_factory.mktemp("swap"))
    return {world: run_ranks(_steps, model, folder, world=world)[0] for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS)
def test_loss_gradient_and_figures_are_the_same(results, world):
    for (stage, micros, reduction), (metrics, weights) in results[world].items():
        expected, expected_weights = results[1][(0, 1, reduction) if reduction == "token_mean" else (2, 1, reduction)]
        where = f"ZeRO-{stage}, {micros} micro-batches, {world} ranks, {reduction}"
        known = {name: value for name, value in expected.items() if value is not None}
        assert len(known) == 12
        assert {name: metrics[name] for name in known} == pytest.approx(known, rel=1e-4, abs=1e-6), where
        # Adam divides by the gradient's own size, so the rounding of a tiny one shows.
        assert abs(weights - expected_weights).mean() < 1e-6, where


def test_a_parameter_that_is_given_to_the_attention_is_gathered(tmp_path):
    """The sinks of gpt-oss, under ZeRO-3."""
    (tmp_path / "swap").mkdir()
    model = str(make_tiny_architecture("gpt_oss", tmp_path / "model"))
    found = run_ranks(_steps, model, str(tmp_path / "swap"), (0, 3), (1,), world=2)[0]
    (expected, expected_weights), (metrics, weights) = (found[stage, 1, "token_mean"] for stage in (0, 3))
    known = {name: value for name, value in expected.items() if value is not None}
    assert {name: metrics[name] for name in known} == pytest.approx(known, rel=1e-4, abs=1e-6)
    assert abs(weights - expected_weights).mean() < 1e-6
