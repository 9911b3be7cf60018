"""Reduced draft vocabularies."""

import pytest
import torch

from torchspec.data.prompts import check_tokenizer
from torchspec.drafts.vocab import build_d2t, build_t2d, target_ids
from torchspec.errors import ConfigError
from torchspec.models.vocabulary import check_ids


def test_most_frequent_tokens_in_the_order_of_their_ids():
    d2t = build_d2t(torch.tensor([1, 9, 0, 9, 5]), size=3)
    assert d2t.tolist() == [1, 2, 2]
    assert d2t.dtype == torch.int64
    assert target_ids(d2t).tolist() == [1, 3, 4]
    assert build_t2d(d2t, 5).tolist() == [False, True, False, True, True]


def test_ties_go_to_the_lower_id():
    assert target_ids(build_d2t(torch.tensor([2, 3, 2, 2]), size=2)).tolist() == [0, 1]
    assert target_ids(build_d2t(torch.zeros(5, dtype=torch.int64), size=3)).tolist() == [0, 1, 2]


def test_kept_tokens_are_in_it_even_if_they_never_occur():
    ids = target_ids(build_d2t(torch.tensor([5, 0, 7, 5, 1, 0]), size=3, keep=[5, 5, 2]))
    assert ids.tolist() == [0, 2, 5]


def test_whole_vocabulary_has_no_offsets():
    assert build_d2t(torch.tensor([3, 1, 2]), size=3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("size", "keep"), [(1, [0, 3]), (5, [])])
def test_impossible_sizes(size, keep):
    with pytest.raises(ConfigError, match=r"draft\.vocab_size = .* must be between"):
        build_d2t(torch.tensor([1, 1, 1, 1]), size=size, keep=keep)


@pytest.mark.parametrize(
    ("ids", "worst"), [([0, 10], 10), ([3, -1, 4], -1), ([9, 12, 11], 12), ([-3, 2], -3), ([10**9], 10**9)]
)
def test_an_id_without_a_row_is_named(ids, worst) -> None:
    check_ids([], 10, "a prompt", "cut it")
    check_ids([0, 9], 10, "a prompt", "cut it")
    with pytest.raises(ConfigError, match=f"a prompt leads to token {worst}, .* 0 to 9; cut it"):
        check_ids(ids, 10, "a prompt", "cut it")


def test_the_largest_id_counts_and_not_how_many_there_are() -> None:
    """A vocabulary with a hole: fewer tokens than the model has rows, and yet one without a row."""

    class Tokenizer:
        eos_token_id, all_special_ids, added_tokens_decoder = 2, [2], {12: "<end>"}

        def get_vocab(self):
            return {"a": 0, "b": 1, "c": 2}

    with pytest.raises(ConfigError, match=r"the tokenizer leads to token 12, .* 0 to 9; they do not belong"):
        check_tokenizer(Tokenizer(), 10)
    check_tokenizer(Tokenizer(), 13)
