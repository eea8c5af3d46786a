"""A reward model's score is that of the last token of a row, whatever its pad token and its neighbours in a batch."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from hybrid.roles.models import load_reward_model
from hybrid.roles.reward import by_length, padding_is_exact, score_rows
from hybrid.roles.zero import FrozenModel
from launch.tiny_models import make_tiny_reward

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
ENDS_WITH_PAD = [1, 40, 50, 60, 7, 8, 2]


def frozen(model) -> FrozenModel:
    return FrozenModel(model.eval(), 0, torch.float32)


def test_c20_a_row_that_ends_with_the_pad_token_is_read_at_its_end(tmp_path):
    model = frozen(load_reward_model(str(make_tiny_reward(tmp_path / "reward")), torch.float32, False))
    row = [1, 40, 50, 60, 70, 80, 2]
    assert score_rows(model, [row], CPU) == pytest.approx([-0.2811], abs=1e-4)
    padded = score_rows(model, [row, [5] * 12, [1, 2], [2, 2, 2]], CPU)
    assert padded[0] == pytest.approx(-0.2811, abs=1e-4)
    trunk = model.module.model(input_ids=torch.tensor([row])).last_hidden_state
    assert padded[0] == pytest.approx(model.module.score(trunk)[0, -1].item(), abs=1e-5)


@pytest.mark.parametrize(
    "model_type", ["gpt2", "gpt_neox", "mistral", "qwen3", "bert", "roberta", "modernbert", "xlnet", "fnet"]
)
def test_c20_scores_do_not_depend_on_padding_in_any_family(model_type):
    own = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "num_labels": 1}
    sizes = (
        SIZES if model_type != "xlnet" else {"vocab_size": 64, "d_model": 64, "n_layer": 2, "n_head": 2, "d_inner": 64}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model_type, **sizes, **own))
    model = frozen(model.float())
    rows = [ENDS_WITH_PAD, [5, 6, 2, 2], [9] * 11, [3, 4, 5, 6, 7, 8, 2]]
    alone = [score_rows(model, [row], CPU)[0] for row in rows]
    mixed = padding_is_exact(model, CPU, torch.float32)
    assert mixed == (model_type not in ("xlnet", "fnet"))
    for batch in by_length([len(row) for row in rows], 1000, mixed):
        scores = score_rows(model, [rows[i] for i in batch], CPU)
        assert scores == pytest.approx([alone[i] for i in batch], abs=1e-5)


def test_c20_rows_that_use_every_token_are_scored_alone(tmp_path):
    model = frozen(load_reward_model(str(make_tiny_reward(tmp_path / "reward")), torch.float32, False))
    rows = [list(range(512)), ENDS_WITH_PAD]
    assert score_rows(model, rows, CPU)[1] == pytest.approx(score_rows(model, [ENDS_WITH_PAD], CPU)[0], abs=1e-5)


def test_rows_of_one_length_share_a_batch_where_padding_is_not_exact():
    assert by_length([3, 5, 3, 5, 5], 100, mixed=False) == [[0, 2], [1, 3, 4]]
    assert by_length([3, 5, 3, 5, 5], 10, mixed=False) == [[0, 2], [1, 3], [4]]
    assert by_length([3, 5, 3], 100) == [[0, 2, 1]]
