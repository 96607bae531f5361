"""Text to token ids, for the policy and for whatever judges it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats import Demonstration, Message, Prompt
from rlhf_cli.errors import ArtifactError, DataError


@dataclass(frozen=True)
class Example:
    """One training sequence."""

    ids: list[int]
    learnt: list[bool]
    """Per token: is it a target of the loss? Token 0 never is, nothing predicts it."""
    where: str


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


def encode_demonstrations(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Demonstration],
    template: str | None,
    *,
    learn_all: bool,
) -> list[Example]:
    """Rows to training sequences; the prompt is not learnt unless `learn_all`."""
    plain = [row for row in rows if not _row_is_chat(row, template, tokenizer)]
    pairs = iter(encode_pairs(tokenizer, [r.prompt for r in plain], [r.response for r in plain], template))
    examples = []
    for row in rows:
        if _row_is_chat(row, template, tokenizer):
            ids, learnt = _encode_conversation(tokenizer, row)
        else:
            prompt, response = next(pairs)
            ids, learnt = prompt + response, [False] * len(prompt) + [True] * len(response)
        if learn_all:
            learnt = [True] * len(ids)
        learnt[0] = False
        examples.append(Example(ids, learnt, row.where))
    return examples


def encode_for_classifier(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int | None
) -> list[list[int]]:
    """Whole texts to ids with the special tokens that an encoder expects.

    One longer than `max_length` loses its beginning: the response that is judged stands at the end.
    """
    if not texts:
        return []
    tokenizer.truncation_side = "left"
    limit = max_length if max_length is not None and max_length < 10**9 else None
    encoded = tokenizer(list(texts), truncation=limit is not None, max_length=limit, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


T = TypeVar("T")


def drop_too_long(items: list[T], length: Callable[[T], int], max_length: int, what: str) -> tuple[list[T], int]:
    """The items of at most `max_length` tokens and how many were dropped; raises DataError if all were."""
    kept = [item for item in items if length(item) <= max_length]
    if items and not kept:
        shortest = min(length(item) for item in items)
        raise DataError(
            f"{what}: all {len(items)} rows are longer than {max_length} tokens, the shortest has {shortest}. "
            "Raise the maximum length (and see that the model takes it)"
        )
    return kept, len(items) - len(kept)


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
