"""ZeRO's arithmetic: the paper's table, DeepSpeed's estimators, and what our roles counted."""

from __future__ import annotations

import pytest

from hybrid.errors import ConfigError
from hybrid.planning.model_state import frozen_bytes, model_state_bytes, trained_state
from hybrid.planning.shapes import ModelShapes, shapes
from launch.tiny_models import tiny_config

BILLION = 10**9


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_paper_figure_1(stage, gigabytes):
    """7.5 billion parameters on 64 GPUs, Rajbhandari et al. 2020."""
    assert round(model_state_bytes(7_500_000_000, 64, stage).total / BILLION, 1) == gigabytes


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (8, 1), (8, 4)])
def test_deepspeed_estimators_agree(gpus, nodes):
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    params, largest, world = 7_500_000_000, 131_000_000, gpus * nodes
    _, of_stage_2 = estimate_zero2_model_states_mem_needs(params, gpus, nodes, cpu_offload=False)
    _, of_stage_3, layer = estimate_zero3_model_states_mem_needs(
        params, largest, gpus, nodes, cpu_offload=False, cpu_offload_params=False
    )
    ours = [model_state_bytes(params, world, stage, gradient_bytes=g).total for stage, g in ((2, 6), (3, 4))]
    assert ours[0] == pytest.approx(of_stage_2, abs=world)
    assert ours[1] == pytest.approx(of_stage_3 - layer, abs=world)


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="stage 4"):
        model_state_bytes(1, 1, 4)


def _model(*sizes: tuple[int, ...]) -> ModelShapes:
    return ModelShapes(tuple((f"p{i}", s) for i, s in enumerate(sizes)), 0, 1, 8, 16)


def test_flat_groups_are_padded_for_every_rank():
    state = trained_state(_model((10, 10), (3,)), world=4, stage=2, element_bytes=2, has_decay=True)
    assert state.weights == 2 * (104 + 8)  # 100 and 3 up to multiples of 2 x 4
    assert state.optimizer == 12 * (104 + 8) // 4


def test_zero_3_cuts_each_parameter_and_keeps_small_ones_whole():
    state = trained_state(_model((1000, 1000), (3,)), world=2, stage=3, element_bytes=2, has_decay=False)
    assert state.weights == 2 * (500_000 + 2 + 3)
    assert state.gradients == 2 * 1_000_448 + 4 * 500_002  # a bucket, and the sums of this rank's share
    assert frozen_bytes(_model((1000, 1000), (3,)), 2, 3, 2) == state.weights


@pytest.mark.parametrize(
    ("stage", "element_bytes", "on_cpu", "elements"),
    [(0, 2, False, 0), (1, 2, False, 1000), (1, 4, False, 0), (2, 2, False, 0)],
)
def test_zero_1_keeps_the_fp32_sums_of_all_gradients_of_a_bf16_model(stage, element_bytes, on_cpu, elements):
    state = trained_state(_model((100, 10)), 4, stage, element_bytes, False, on_cpu)
    assert state.gradients == 4 * elements


@pytest.mark.parametrize(
    ("stage", "element_bytes", "kept"), [(1, 2, 2000), (2, 2, 2000), (2, 4, 4000), (3, 2, 2 * 2048)]
)
def test_an_optimizer_on_the_cpu_leaves_a_buffer_for_the_largest_parameter(stage, element_bytes, kept):
    """DeepSpeed's `temp_grad_buffer_for_gpu_offload`, of stages 1 and 2. ZeRO-3 keeps its bucket; its sums are on the CPU too."""
    state = trained_state(_model((100, 10), (800,)), 4, stage, element_bytes, False, True)
    assert state.gradients == kept


def test_fp32_weights_are_their_own_masters_at_stage_0_only():
    per_stage = [trained_state(_model((1000, 1000)), 1, stage, 4, False).optimizer for stage in (0, 1, 2, 3)]
    assert per_stage == [8_000_000, 12_000_000, 12_000_000, 12_000_000]


def test_shapes_of_tied_embeddings_and_heads(tmp_path):
    untied, tied = ({"tie_word_embeddings": t, "architectures": ["LlamaForCausalLM"]} for t in (False, True))
    tiny_config(**untied).save_pretrained(tmp_path / "untied")
    tiny_config(**tied).save_pretrained(tmp_path / "tied")
    table = 512 * 128
    whole = shapes(str(tmp_path / "untied"), "policy").elements
    assert shapes(str(tmp_path / "tied"), "policy").elements == whole - table
    assert shapes(str(tmp_path / "untied"), "critic").elements == whole - table + 128 + 1


def test_a_model_without_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        shapes(str(tmp_path), "policy")
