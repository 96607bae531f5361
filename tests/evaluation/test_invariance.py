"""What should not change a reward model's opinion, measured on scorers whose answer is known."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_cli.config.data import Rows
from rlhf_cli.data.answers import RankingEncoder
from rlhf_cli.data.encode import LengthLimits
from rlhf_cli.data.records import Answer, Message, Record, transcript
from rlhf_cli.data.stage_rows import StageRows
from rlhf_cli.evaluation import normalization
from rlhf_cli.evaluation.preferences import PREFIXES, Pairs, prefix_figures, with_prefix


@pytest.fixture
def encoder(tokenizer):
    rows = StageRows(Rows(train="x", test_fraction=0), "rm pairs", limits=LengthLimits(200))
    return RankingEncoder(tokenizer, rows, reads_last_token=True)


def ranked(encoder, number):
    """Pairs whose better answer has two words more."""
    rows = [
        Record(f"Q {i}", f"f:{i}", (Answer(" the tent is late today"), Answer(" the tent is")), ranked=True)
        for i in range(number)
    ]
    return [encoder.items(row, tokens)[0] for row, tokens in zip(rows, encoder.sequences(rows), strict=True)]


def pairs_of(rows, score):
    """The rows with their scores."""
    scores = score([[r.answers[0], r.answers[-1]] for r in rows])
    return Pairs(rows, scores[0::2], scores[1::2])


def by_length(rows, _lengths=None):
    """A scorer that does not see the prompt: tokens of a sequence."""
    return torch.tensor([float(len(ids)) for row in rows for ids in row])


def test_scores_are_normalised_over_better_and_worse_answers_alike(encoder):
    config = SimpleNamespace(evaluation=SimpleNamespace(num_normalization_samples=5))
    found = normalization._rows(ranked(encoder, 3), config)
    better, worse = " the tent is late today", " the tent is"
    assert [row.response for row in found] == [better, worse, better, worse, better]
    assert [row.prompt for row in found] == ["Q 0", "Q 1", "Q 2", "Q 0", "Q 1"]


def test_the_model_that_is_sampled_has_the_revision_of_the_config(tmp_path, monkeypatch):
    """Without an SFT stage it is the language model that the reward model starts from."""
    monkeypatch.setattr(normalization, "is_language_model", lambda *_: True)
    config = SimpleNamespace(artifacts=str(tmp_path), model=SimpleNamespace(path="organisation/model", revision="v1"))
    assert normalization._sft_model(config) == ("organisation/model", "v1")


def test_a_ranking_without_its_equal_answer_has_the_texts_of_those_that_are_left(encoder):
    row = Record("Q", "f:1", (Answer(" the tent"), Answer(" the tent"), Answer(" is late")), ranked=True)
    ((item,),) = [encoder.items(row, tokens) for tokens in encoder.sequences([row])]
    assert item.row.texts == (" the tent", " is late")
    assert len(item.answers) == 2


def test_words_before_the_prompt_change_nothing_for_a_scorer_of_answers(encoder):
    figures = prefix_figures(pairs_of(ranked(encoder, 6), by_length), encoder, by_length, seed=0)
    assert figures["prefix_flips"].value == 0
    assert figures["prefix_shift"].value == pytest.approx(0, abs=1e-9)


def test_a_preference_that_turns_with_the_prefix_is_found(encoder, tokenizer):
    greeting = PREFIXES[0].strip()

    def turned(rows, _lengths=None):
        signs = [-1 if greeting in tokenizer.decode(ids) else 1 for row in rows for ids in row]
        return by_length(rows) * torch.tensor(signs)

    figures = prefix_figures(pairs_of(ranked(encoder, 6), turned), encoder, turned, seed=0)
    assert figures["prefix_flips"].value == pytest.approx(1 / len(PREFIXES))
    assert figures["prefix_flips"].rows == 6


def test_rows_without_a_prompt_have_no_prefix(encoder):
    rows = ranked(encoder, 3)
    bare = [type(row)(row.answers, Record("", "f:1", row.row.answers, ranked=True)) for row in rows]
    assert prefix_figures(pairs_of(bare, by_length), encoder, by_length, seed=0) == {}


def test_the_prefix_of_a_conversation_is_in_its_first_user_turn():
    turns = (Message("system", "s"), Message("user", "late?"), Message("assistant", "yes"), Message("user", "why?"))
    found = with_prefix(
        Record(transcript(turns), "f:1", (Answer("a"), Answer("b")), ranked=True, messages=turns), "Hello. "
    )
    assert [m.content for m in found.messages] == ["s", "Hello. late?", "yes", "why?"]
    assert found.prompt == transcript(found.messages)
