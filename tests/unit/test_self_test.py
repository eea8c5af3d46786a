"""The prompts of the self-test fit beside their answers in whatever sequences a profile allows (N2)."""

from __future__ import annotations

import pytest

from hybrid.rollout.self_test import self_test_prompts, self_test_tokens
from launch.tiny_models import make_tokenizer


@pytest.mark.parametrize("longest", [2, 3, 4, 5, 8, 17, 65, 4096])
def test_n2_prompts_and_answers_fit(longest):
    short, long = self_test_prompts(make_tokenizer(), longest)
    assert 1 <= len(short) <= len(long)
    assert len(long) + self_test_tokens(longest) <= longest
    assert longest < 4 or len(short) < len(long)
    assert self_test_tokens(longest) == max(1, min(12, longest // 2))


def test_n2_a_tokenizer_that_knows_no_letter_of_them_gives_one_token():
    assert self_test_prompts(lambda text: {"input_ids": []}, 20) == [[0], [0]]
