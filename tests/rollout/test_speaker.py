"""A model that speaks: what fits its positions, how it draws, and what it shows of a reply that grows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_cli.config.ppo import Rollout
from rlhf_cli.data.records import Message, Record
from rlhf_cli.models.load import load_policy, load_tokenizer, prepare
from rlhf_cli.rollout.sampling import Response, draw_uniforms
from rlhf_cli.rollout.speaker import PromptForm, PromptRefused, Speaker
from support.tiny import CPU

POSITIONS = 128


@pytest.fixture(scope="module")
def speaker(make_model: Any) -> Speaker:
    path: Path = make_model("llama")
    model = load_policy(str(path))
    prepare(model, CPU)
    return Speaker.of(Rollout(max_new_tokens=20, top_p=0.9), model, load_tokenizer(str(path)), "float32")


def prompt_of(speaker: Speaker, length: int) -> Record:
    """A prompt of so many tokens."""
    words = "tent"
    while len(speaker.form.encode_row(speaker.tokenizer, Record(words, "here"))) < length:
        words += " tent"
    assert len(speaker.form.encode_row(speaker.tokenizer, Record(words, "here"))) == length
    return Record(words, "here")


def test_a_prompt_must_leave_room_for_the_longest_reply_to_the_last_position(speaker: Speaker) -> None:
    fits, long = prompt_of(speaker, POSITIONS - 20), prompt_of(speaker, POSITIONS - 19)
    assert [row for row, _ in speaker.fitting([long, fits])] == [fits]
    ids = speaker.encode(fits)
    assert (len(ids), speaker.room(ids)) == (speaker.longest_prompt, 20)
    with pytest.raises(PromptRefused, match=r"^109 prompt tokens and 20 new tokens do not fit the model's 128"):
        speaker.encode(long)
    assert len(speaker.encode(long, takes_what_fits=True)) == POSITIONS - 19
    with pytest.raises(PromptRefused, match=r"^the prompt has 128 tokens and the model reads 128, reply included"):
        speaker.encode(prompt_of(speaker, POSITIONS), takes_what_fits=True)
    with pytest.raises(PromptRefused, match="the prompt has no token") as caught:
        speaker.room([])
    assert caught.value.reason == "prompt empty"


def test_temperature_0_takes_the_likeliest_token_and_none_changes_nothing(speaker: Speaker) -> None:
    assert speaker.at(None) is speaker
    assert speaker.at(0.5).sampling == replace(speaker.sampling, temperature=0.5)
    greedy = [speaker.at(0).respond([[5, 6, 7]], draw_uniforms(seed, "x", 0, 1, 9))[0].ids for seed in (0, 1)]
    assert greedy[0] == greedy[1] != speaker.respond([[5, 6, 7]], draw_uniforms(1, "x", 0, 1, 9))[0].ids


def test_the_chat_template_of_a_transcript_writes_the_prompt_of_its_rows(speaker: Speaker) -> None:
    form = PromptForm("transcript", "🙂 é\n{prompt}\t🙂", "\n\n")
    template, talk = form.chat_template(speaker.tokenizer), [Message("user", "a 🙂"), Message("assistant", "b")] * 2
    text = speaker.tokenizer.apply_chat_template([vars(m) for m in talk[:3]], chat_template=template, tokenize=False)
    assert text == "<bos>🙂 é\n\n\nHuman: a 🙂\n\nAssistant: b\n\nHuman: a 🙂\n\nAssistant:\t🙂"


@pytest.mark.parametrize("as_message", [True, False])
def test_what_is_streamed_is_the_response_and_an_error_in_it_ends_it(speaker: Speaker, as_message: bool) -> None:
    uniforms, shown = draw_uniforms(0, "x", 0, 1, 12), list[str]()
    (response,) = speaker.respond([[5, 6, 7]], uniforms)
    reply = speaker.stream([5, 6, 7], uniforms, shown.append, as_message=as_message)
    text = speaker.text(response)
    assert (reply.response, reply.text) == (response, text.strip() if as_message else text)
    assert shown[-1] == reply.text

    def stop(text: str) -> None:
        shown.append(text)
        raise KeyboardInterrupt

    shown.clear()
    with pytest.raises(KeyboardInterrupt):
        speaker.stream([5, 6, 7], uniforms, stop)
    part = speaker.stream([5, 6, 7], uniforms, stop, keep_partial=True) if shown[0] else None
    assert part is None or (part.text, part.response.ids, part.response.ended) == (shown[0], response.ids[:1], False)


@pytest.mark.parametrize(
    ("text", "stop_strings", "fewest", "ended", "expected"),
    [
        ("a 🙂 xyz", ("xyq",), 0, False, ["a", "a ", "a 🙂", "a 🙂 xyz"]),
        ("\n\nxyz:", ("\n\nxyz:",), 0, True, [""]),
        ("a xyz q z", ("xyz", "q z"), 7, True, ["a", "a xyz"]),  # the first one comes too early
        ("a xyz q", ("xyz",), 99, False, ["a", "a xyz", "a xyz q"]),
    ],
)
def test_half_a_character_and_a_stop_string_are_not_shown(
    text: str,
    stop_strings: tuple[str, ...],
    fewest: int,
    ended: bool,
    expected: list[str],
    speaker: Speaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each byte is a token. The tokens are given; only what is shown of them is tested."""
    ids = [token for letter in text for token in speaker.tokenizer(letter, add_special_tokens=False)["input_ids"]]

    def respond(_: Speaker, _prompts: Any, _uniforms: Any, on_tokens: Any) -> list[Response]:
        for token in ids:
            on_tokens(torch.tensor([token]))
        return [Response(ids, [], ended=ended)]

    monkeypatch.setattr(Speaker, "respond", respond)
    shown: list[str] = []
    sampling = replace(speaker.sampling, stop_strings=stop_strings, min_new_tokens=fewest)
    reply = replace(speaker, sampling=sampling).stream([5], torch.zeros(1, len(ids)), shown.append)
    assert reply.text == expected[-1]
    assert list(dict.fromkeys(shown)) == expected
