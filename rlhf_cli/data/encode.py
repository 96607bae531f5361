"""Text to token ids, for the policy and for whatever judges it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.records import Demonstration, Message, Prompt, Record, demonstration
from rlhf_cli.errors import ArtifactError, DataError


@dataclass(frozen=True)
class Example:
    """One training sequence."""

    ids: list[int]
    learnt: list[bool]
    """Per token: is it a target of the loss? Token 0 never is, nothing predicts it."""
    where: str


@dataclass(frozen=True)
class LeftOut:
    """A row that is not learnt from, and why."""

    reason: str


def answer_to_learn(record: Record, side: str) -> Demonstration | LeftOut:  # noqa: ARG001
    """What SFT learns of a row."""
    return demonstration(record) or LeftOut("no answer to learn from")


@dataclass(frozen=True)
class Limits:
    """How long a sequence may be, in tokens, and what happens to a longer one (`Data` says what each means)."""

    max_length: int
    truncation: Literal["drop", "left", "right"] = "drop"
    min_response_length: int = 0


def fit(ids: list[int], answer: list[bool], limits: Limits, bos: int | None) -> tuple[list[int], list[bool]] | LeftOut:
    """A sequence and which of its tokens are an answer's, cut to `limits.max_length` where it is longer.

    `left` keeps a first token that is `bos`, and the last answer whole with a token before it; `right` keeps a
    token of an answer at least. What can't be cut so is left out.

    >>> fit([0, 5, 6, 7, 8], [False, False, False, True, True], Limits(4, "left"), bos=0)
    ([0, 6, 7, 8], [False, False, True, True])
    >>> fit([5, 6, 7, 8], [False, True, True, True], Limits(3, "left"), bos=None)
    LeftOut(reason='longer than 3 tokens, and so is its answer')
    """
    if sum(answer) < limits.min_response_length:
        return LeftOut(f"answers of fewer than {limits.min_response_length} tokens")
    longest = limits.max_length
    if len(ids) <= longest:
        return ids, answer
    if limits.truncation == "drop":
        return LeftOut(f"longer than {longest} tokens")
    if limits.truncation == "right":
        if not any(answer[:longest]):
            return LeftOut(f"longer than {longest} tokens before its answer")
        return ids[:longest], answer[:longest]
    first = [ids[0]] if ids[0] == bos and longest > 1 else []
    start = len(ids) - longest + len(first)
    begins = len(ids) - next((n for n, learnt in enumerate(reversed(answer)) if not learnt), len(ids))
    if (begins <= start and not first) or begins < start:
        return LeftOut(f"longer than {longest} tokens, and so is its answer")
    return first + ids[start:], [False] * len(first) + answer[start:]


def fit_prompt(ids: list[int], limits: Limits, bos: int | None) -> list[int] | LeftOut:
    """A prompt, cut to `limits.max_length` where it is longer; `left` keeps a first token that is `bos`.

    >>> fit_prompt([0, 5, 6, 7], Limits(3, "left"), bos=0)
    [0, 6, 7]
    """
    longest = limits.max_length
    if len(ids) <= longest:
        return ids
    if limits.truncation == "drop":
        return LeftOut(f"prompts longer than {longest} tokens")
    if limits.truncation == "right":
        return ids[:longest]
    first = [ids[0]] if ids[0] == bos and longest > 1 else []
    return first + ids[len(ids) - longest + len(first) :]


def require_eos(tokenizer: PreTrainedTokenizerBase, path: str) -> int:
    """The EOS id; raises ArtifactError for a tokenizer that has none, since no answer could ever end."""
    if tokenizer.eos_token_id is None:
        raise ArtifactError(f"{path}: the tokenizer has no EOS token, answers could not end. Set eos_token in it")
    return int(tokenizer.eos_token_id)


def prompt_text(
    prompt: str, template: str | None, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message] = ()
) -> str:
    """The prompt as the model reads it; `messages` are those of a conversation, before the answer."""
    if is_chat(messages, template, tokenizer):
        return _chat_text(tokenizer, messages, generation=True)
    if template is None:
        return prompt
    if template == "chat":
        require_chat_template(tokenizer)
        return _chat_text(tokenizer, [Message("user", prompt)], generation=True)
    return template.replace("{prompt}", prompt)


def whole_text(row: Demonstration, template: str | None, tokenizer: PreTrainedTokenizerBase) -> str:
    """A row's prompt and response as one text, for a model that has no use for their tokens apart."""
    if is_chat(row.messages, template, tokenizer):
        return _chat_text(tokenizer, row.messages, generation=False)
    return prompt_text(row.prompt, template, tokenizer) + row.response


def is_chat(messages: Sequence[Message], template: str | None, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Is a row written in the tokenizer's chat template? A conversation is, where there is one."""
    return bool(messages) and (template == "chat" or (template is None and bool(tokenizer.chat_template)))


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError where prompt_template: chat can't work."""
    if not tokenizer.chat_template:
        raise DataError("data.prompt_template: chat, but the tokenizer has no chat template. Write one with {prompt}")


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], template: str | None, *, start: bool = True
) -> list[list[int]]:
    """Prompts to ids, never ending in an EOS that a tokenizer appends by itself (T5-like ones, some Llamas).

    With `start`, BOS (else EOS) stands for a prompt of no tokens, so that something predicts the first one.
    """
    texts = [prompt_text(prompt, template, tokenizer) for prompt in prompts]
    eos = int(tokenizer.eos_token_id)
    encoded = []
    for ids in _encode(tokenizer, texts, special=template != "chat"):
        bare = ids[:-1] if len(ids) > 1 and ids[-1] == eos else ids
        first = eos if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)
        encoded.append(bare or ([first] if start else []))
    return encoded


def encode_rows(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Demonstration | Prompt], template: str | None
) -> list[list[int]]:
    """The ids that a response to each row follows: those that SFT has before the row's last answer."""
    plain = iter(
        encode_prompts(tokenizer, [r.prompt for r in rows if not _row_is_chat(r, template, tokenizer)], template)
    )
    return [
        _encode_turns(tokenizer, before_answer(row), row.where)[0]
        if _row_is_chat(row, template, tokenizer)
        else next(plain)
        for row in rows
    ]


def before_answer(row: Demonstration | Prompt) -> tuple[Message, ...]:
    """The messages of a conversation that come before its last answer; none for other rows."""
    return row.messages if isinstance(row, Prompt) else row.messages[:-1]


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    responses: Sequence[str],
    template: str | None,
    *,
    start: bool = True,
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids with EOS) of each row.

    The prompt's ids are those that a rollout starts from. The response's are what follows them in the ids of
    the whole text, or, where the tokenizer merges across the boundary, the response's own ids: a policy can
    only ever continue after the prompt's ids.
    """
    eos = int(tokenizer.eos_token_id)
    prompt_ids = encode_prompts(tokenizer, prompts, template, start=start)
    texts = [prompt_text(prompt, template, tokenizer) for prompt in prompts]
    whole_ids = _encode(tokenizer, [t + r for t, r in zip(texts, responses, strict=True)], special=template != "chat")
    pairs = []
    for prompt, whole, response in zip(prompt_ids, whole_ids, responses, strict=True):
        bare = whole[:-1] if whole and whole[-1] == eos else whole
        if bare[: len(prompt)] == prompt and len(bare) > len(prompt):
            answer = bare[len(prompt) :]
        else:
            answer = _encode(tokenizer, [response], special=False)[0]
        pairs.append((prompt, [*answer, eos]))
    return pairs


def encode_answers(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Demonstration], template: str | None, *, start: bool = True
) -> list[tuple[list[int], list[bool]]]:
    """Rows to (ids, which of them are an answer's, EOS among them): of a conversation every assistant turn."""
    plain = [row for row in rows if not _row_is_chat(row, template, tokenizer)]
    texts = [r.prompt for r in plain], [r.response for r in plain]
    pairs = iter(encode_pairs(tokenizer, *texts, template, start=start))
    found = []
    for row in rows:
        if _row_is_chat(row, template, tokenizer):
            found.append(_encode_conversation(tokenizer, row))
        else:
            prompt, response = next(pairs)
            found.append((prompt + response, [False] * len(prompt) + [True] * len(response)))
    return found


def encode_demonstrations(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Demonstration],
    template: str | None,
    *,
    learn_all: bool,
    limits: Limits | None = None,
) -> list[Example | LeftOut]:
    """Rows to training sequences within `limits`; the prompt is not learnt unless `learn_all`."""
    found: list[Example | LeftOut] = []
    for row, (ids, answer) in zip(rows, encode_answers(tokenizer, rows, template), strict=True):
        fitting = fit(ids, answer, limits, tokenizer.bos_token_id) if limits is not None else (ids, answer)
        if isinstance(fitting, LeftOut):
            found.append(fitting)
            continue
        kept, learnt = fitting
        learnt = [learn_all or is_answer for is_answer in learnt]
        learnt[0] = False
        found.append(Example(kept, learnt, row.where))
    return found


def encode_for_classifier(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int | None,
    side: Literal["left", "right"] = "left",
) -> list[list[int]]:
    """Whole texts to ids with the special tokens that an encoder expects.

    One longer than `max_length` loses its beginning, as the response that is judged stands at the end; or, with
    side "right", its end.
    """
    if not texts:
        return []
    tokenizer.truncation_side = side
    limit = max_length if max_length is not None and max_length < 10**9 else None
    encoded = tokenizer(list(texts), truncation=limit is not None, max_length=limit, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def _row_is_chat(row: Demonstration | Prompt, template: str | None, tokenizer: PreTrainedTokenizerBase) -> bool:
    return is_chat(row.messages, template, tokenizer)


def _chat_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, generation: bool) -> str:
    plain = [{"role": m.role, "content": m.content} for m in messages]
    try:
        return str(tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generation))
    except Exception as error:
        # The template is the tokenizer's own program, run in a sandbox; what it raises is not ours.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"the tokenizer's chat template fails: {reason}. Give data.prompt_template instead") from None


def _encode_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str
) -> tuple[list[int], list[bool]]:
    """A conversation in the chat template, turn by turn; every assistant turn is learnt, with what ends it.

    One that ends before an answer ends with the template's invitation to answer, in the very ids that it has
    when the answer follows.
    """
    require_chat_template(tokenizer)
    cuts = [(end, kind) for end, m in enumerate(messages) if m.role == "assistant" for kind in ("before", "answer")]
    if messages[-1].role != "assistant":
        cuts.append((len(messages), "before"))
    ids: list[int] = []
    learnt: list[bool] = []
    text = ""
    for end, kind in cuts:
        answered = kind == "answer"
        longer = _chat_text(tokenizer, messages[: end + answered], generation=not answered)
        if not longer.startswith(text):
            raise DataError(
                f"{where}: the chat template rewrites earlier turns, so the turns can't be told apart. "
                "Split the conversation into rows of one answer each"
            )
        part = _encode(tokenizer, [longer[len(text) :]], special=False)[0]
        ids += part
        learnt += [answered] * len(part)
        text = longer
    return ids, learnt


def _encode_conversation(tokenizer: PreTrainedTokenizerBase, row: Demonstration) -> tuple[list[int], list[bool]]:
    ids, learnt = _encode_turns(tokenizer, row.messages, row.where)
    eos = int(tokenizer.eos_token_id)
    if eos not in ids[-3:]:
        # Templates end a turn with the EOS token, some with a newline behind it; one that has none gets it.
        ids.append(eos)
        learnt.append(True)
    return ids, learnt


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[list[int]]:
    if not texts:
        return []
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]]
