"""Text to token ids, for the policy and for the models that judge it."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from rlhf_cli.data.records import Demonstration, Message, Prompt
from rlhf_cli.data.special_tokens import SpecialTokens, cut_behind_eos, special_tokens_of
from rlhf_cli.errors import ArtifactError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TEMPLATE_LINES, MOST_TEMPLATE_CHARACTERS = 10_000_000, 100_000_000
"""Lines that a chat template may execute and characters that it may write for one conversation."""


@dataclass(frozen=True)
class Example:
    """One training sequence of SFT."""

    ids: list[int]
    loss_mask: list[bool]
    """True for each token that is a target of the loss. Token 0 never is: no token predicts it."""
    where: str


@dataclass(frozen=True)
class Skipped:
    """The reason why an item of the data is not used."""

    reason: str
    needs: int | None = None
    """The smallest length limit that would keep the item, in tokens. None if its length is not the reason."""


@dataclass(frozen=True)
class Limits:
    """The length limits of a token sequence, and how to treat a longer one (`Data` documents each field)."""

    max_length: int
    truncation: Literal["drop", "left", "right"] = "drop"
    min_response_length: int = 0


def fit(
    ids: list[int], answer_mask: list[bool], limits: Limits, bos: int | None
) -> tuple[list[int], list[bool]] | Skipped:
    """Cut a sequence and its answer mask to `limits.max_length`.

    `left` keeps a first token that is `bos`, the whole last answer, and at least one token before it. `right` keeps at
    least one token of an answer. A sequence that cannot be cut that way is skipped.

    >>> fit([0, 5, 6, 7, 8], [False, False, False, True, True], Limits(4, "left"), bos=0)
    ([0, 6, 7, 8], [False, False, True, True])
    >>> fit([5, 6, 7, 8], [False, True, True, True], Limits(3, "left"), bos=None)
    Skipped(reason='longer than 3 tokens, and so is its answer', needs=4)
    """
    if sum(answer_mask) < limits.min_response_length:
        return too_short(limits)
    longest = limits.max_length
    if len(ids) <= longest:
        return ids, answer_mask
    if limits.truncation == "drop":
        return Skipped(f"longer than {longest} tokens", needs=len(ids))
    if limits.truncation == "right":
        if not any(answer_mask[:longest]):
            # Without any answer token no limit below the whole length would help.
            first_answer = answer_mask.index(True) if any(answer_mask) else len(ids) - 1
            return Skipped(f"longer than {longest} tokens before its answer", needs=first_answer + 1)
        return ids[:longest], answer_mask[:longest]
    first = [ids[0]] if ids[0] == bos and longest > 1 else []
    start = len(ids) - longest + len(first)
    answer_start = len(ids) - last_run(answer_mask)
    if (answer_start <= start and not first) or answer_start < start:
        return Skipped(f"longer than {longest} tokens, and so is its answer", needs=last_run(answer_mask) + 1)
    return first + ids[start:], [False] * len(first) + answer_mask[start:]


def too_short(limits: Limits) -> Skipped:
    """The reason to skip a row with an answer below `limits.min_response_length`."""
    return Skipped(f"answers of fewer than {limits.min_response_length} tokens")


def fit_prompt(ids: list[int], limits: Limits, bos: int | None) -> list[int] | Skipped:
    """Cut a prompt to `limits.max_length`. `left` keeps a first token that is `bos`.

    >>> fit_prompt([0, 5, 6, 7], Limits(3, "left"), bos=0)
    [0, 6, 7]
    """
    longest = limits.max_length
    if len(ids) <= longest:
        return ids
    if limits.truncation == "drop":
        return Skipped(f"prompts longer than {longest} tokens", needs=len(ids))
    if limits.truncation == "right":
        return ids[:longest]
    first = [ids[0]] if ids[0] == bos and longest > 1 else []
    return first + ids[len(ids) - longest + len(first) :]


def last_run(mask: Sequence[bool]) -> int:
    """The length of the run of True at the end of a mask: the tokens of the last answer.

    >>> last_run([False, True, False, True, True])
    2
    """
    return next((n for n, is_answer in enumerate(reversed(mask)) if not is_answer), len(mask))


def require_eos(tokenizer: PreTrainedTokenizerBase, path: str) -> int:
    """The EOS id. Raises ArtifactError for a tokenizer without one: its answers could never end."""
    if tokenizer.eos_token_id is None:
        raise ArtifactError(f"{path}: the tokenizer has no EOS token, so answers could not end. Set its eos_token")
    return int(tokenizer.eos_token_id)


def prompt_text(
    prompt: str,
    template: str | None,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message] = (),
    special: SpecialTokens | None = None,
) -> str:
    """The prompt as the model reads it. `messages` are the turns of a conversation before the answer.

    With `special`, the special tokens of the row's own text are marked, for `SpecialTokens.encode`.
    """
    if is_chat(messages, template, tokenizer):
        return chat_text(tokenizer, messages, special, generation=True)
    if template == "chat":
        require_chat_template(tokenizer)
        return chat_text(tokenizer, [Message("user", prompt)], special, generation=True)
    before, _, after = (template or "{prompt}").partition("{prompt}")
    if special is None:
        return before + prompt + after
    return special.join(special.join(before, special.protect(prompt)), after)


def whole_text(
    row: Demonstration, template: str | None, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens | None = None
) -> str:
    """A row's prompt and response as one text, for a model that tokenises the two together."""
    if is_chat(row.messages, template, tokenizer):
        return chat_text(tokenizer, row.messages, special, generation=False)
    prompt = prompt_text(row.prompt, template, tokenizer, special=special)
    return prompt + row.response if special is None else special.join(prompt, special.protect(row.response))


def is_chat(messages: Sequence[Message], template: str | None, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a row is written in the chat template: a conversation is, if the tokenizer has one."""
    return bool(messages) and (template == "chat" or (template is None and bool(tokenizer.chat_template)))


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if the tokenizer has no chat template for `prompt_template: chat`."""
    if not tokenizer.chat_template:
        raise DataError("data.prompt_template: chat, but the tokenizer has no chat template. Write one with {prompt}")


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    template: str | None,
    *,
    start: bool = True,
    keep_special: bool = False,
) -> list[list[int]]:
    """Encode prompts, without the EOS that some tokenizers append by themselves (T5, some Llamas).

    With `start`, an empty prompt becomes BOS (or EOS if there is no BOS), so that a token predicts the first one.
    With `keep_special`, special tokens in the rows' own text stay special, here and below.
    """
    special = special_tokens_of(tokenizer)
    texts = [prompt_text(prompt, template, tokenizer, special=None if keep_special else special) for prompt in prompts]
    eos = int(tokenizer.eos_token_id)
    encoded = []
    different = list(dict.fromkeys(texts))  # the answers of a ranking share their prompt
    ids_of = dict(zip(different, special.encode(different, add_special_tokens=template != "chat"), strict=True))
    for ids in (ids_of[text] for text in texts):
        bare = ids[:-1] if len(ids) > 1 and ids[-1] == eos else [*ids]
        first = eos if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)
        encoded.append(bare or ([first] if start else []))
    return encoded


def encode_rows(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Demonstration | Prompt],
    template: str | None,
    *,
    keep_special: bool = False,
) -> list[list[int]]:
    """The ids that a response to each row follows, the same that SFT has before the row's last answer."""
    plain = [row.prompt for row in rows if not is_chat(row.messages, template, tokenizer)]
    prompts = iter(encode_prompts(tokenizer, plain, template, keep_special=keep_special))
    return [
        _encode_turns(tokenizer, before_answer(row), row.where, keep_special=keep_special)[0]
        if is_chat(row.messages, template, tokenizer)
        else next(prompts)
        for row in rows
    ]


def before_answer(row: Demonstration | Prompt) -> tuple[Message, ...]:
    """The messages of a conversation before its last answer. Empty for other rows."""
    return row.messages if isinstance(row, Prompt) else row.messages[:-1]


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    responses: Sequence[str],
    template: str | None,
    *,
    start: bool = True,
    keep_special: bool = False,
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids with EOS) of each row.

    The prompt ids are those that a rollout starts from. The response ids are the rest of the whole text's ids. If the
    tokenizer merges characters across the boundary, the response is encoded by itself instead, because a policy can
    only continue after the prompt's ids.
    """
    eos = int(tokenizer.eos_token_id)
    special = special_tokens_of(tokenizer)
    marks = None if keep_special else special
    prompt_ids = encode_prompts(tokenizer, prompts, template, start=start, keep_special=keep_special)
    rows = [Demonstration(prompt, response, "") for prompt, response in zip(prompts, responses, strict=True)]
    texts = [whole_text(row, template, tokenizer, marks) for row in rows]
    whole_ids = special.encode(texts, add_special_tokens=template != "chat")
    pairs = []
    for prompt, whole, response in zip(prompt_ids, whole_ids, responses, strict=True):
        bare = whole[:-1] if whole and whole[-1] == eos else whole
        if bare[: len(prompt)] == prompt and len(bare) > len(prompt):
            answer = bare[len(prompt) :]
        else:
            text = response if keep_special else special.protect(response)
            answer = special.encode([text], add_special_tokens=False)[0]
        pairs.append((prompt, [*answer, eos]))
    return pairs


def encode_answers(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Demonstration],
    template: str | None,
    *,
    start: bool = True,
    keep_special: bool = False,
) -> list[tuple[list[int], list[bool]]]:
    """(ids, answer mask) of each row. The mask includes EOS, and of a conversation every assistant turn.

    An answer that was cut (`ended` is false) gets no EOS: the model would learn to stop where the cut was.
    """
    plain = [row for row in rows if not is_chat(row.messages, template, tokenizer)]
    texts = [r.prompt for r in plain], [r.response for r in plain]
    pairs = iter(encode_pairs(tokenizer, *texts, template, start=start, keep_special=keep_special))
    found = []
    for row in rows:
        if is_chat(row.messages, template, tokenizer):
            found.append(_encode_conversation(tokenizer, row, keep_special=keep_special))
        else:
            prompt, response = next(pairs)
            response = response if row.ended else response[:-1]
            found.append((prompt + response, [False] * len(prompt) + [True] * len(response)))
    return found


def training_example(
    ids: list[int], answer_mask: list[bool], where: str, limits: Limits | None, bos: int | None, *, learn_all: bool
) -> Example | Skipped:
    """A sequence cut to the limits, with its loss mask: the answers, or with `learn_all` everything after token 0."""
    fitting = fit(ids, answer_mask, limits, bos) if limits is not None else (ids, answer_mask)
    if isinstance(fitting, Skipped):
        return fitting
    ids, answer_mask = fitting
    loss_mask = [learn_all or is_answer for is_answer in answer_mask]
    loss_mask[0] = False
    return Example(ids, loss_mask, where)


def encode_for_classifier(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int | None,
    side: Literal["left", "right"] = "left",
) -> list[list[int]]:
    """Encode whole texts with the special tokens that an encoder model expects.

    A text longer than `max_length` loses its beginning, because the response to judge is at the end. With side
    "right" it loses its end. Special tokens that `SpecialTokens.protect` marked in a text are read as text.
    """
    limit = max_length if max_length is not None and max_length < 10**9 else None
    return special_tokens_of(tokenizer).encode(texts, add_special_tokens=True, max_length=limit, side=side)


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    special: SpecialTokens | None = None,
    *,
    generation: bool,
) -> str:
    """The messages in the tokenizer's chat template. Raises DataError if the template fails.

    `generation` adds the beginning of the assistant's next message. With `special`, the special tokens of the
    messages' own text are marked.
    """
    protect = str if special is None else special.protect
    plain = [{"role": m.role, "content": protect(m.content)} for m in messages]
    template = str(tokenizer.chat_template)
    # Tracing makes a rendering four times as slow, so only the first one of each template is traced.
    before, is_known = sys.gettrace(), template in _rendered
    try:
        _require_small_products(template)
        if not is_known:
            sys.settrace(_TemplateLimit().enter)
        text = str(tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generation))
        _rendered.add(template)
        return text
    except Exception as error:
        # The template is a program that comes with the tokenizer. It runs in a sandbox and may raise anything.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"the tokenizer's chat template fails: {reason}. Give data.prompt_template instead") from None
    finally:
        if not is_known:
            sys.settrace(before)


_rendered: set[str] = set()
"""The chat templates that have rendered a conversation within the limits."""


@functools.lru_cache(maxsize=16)
def _require_small_products(template: str) -> None:
    """Raise ValueError for a product or power of large numbers in a template, which is computed when it is compiled."""
    from jinja2 import Environment, TemplateError, nodes

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:  # transformers says what is wrong, or knows the tag
        return
    for node in tree.find_all((nodes.Mul, nodes.Pow)):
        numbers = [each.value for each in node.find_all(nodes.Const) if type(each.value) is int]
        if isinstance(node, nodes.Pow) or abs(math.prod(numbers)) > MOST_TEMPLATE_LINES:
            raise ValueError("it writes or repeats too much")


class _TemplateLimit:
    """Ends a chat template that writes or repeats too much. Its sandbox limits neither."""

    def __init__(self) -> None:
        self.num_lines = self.num_characters = 0

    def enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        """Observe the code of templates, and no other."""
        return self.observe if frame.f_code.co_filename == "<template>" else None

    def observe(self, _frame: FrameType, event: str, argument: Any) -> Any:
        """Count a line, or a piece of text that is written."""
        self.num_lines += event == "line"
        self.num_characters += len(argument) if event == "return" and isinstance(argument, str) else 0
        if self.num_lines > MOST_TEMPLATE_LINES or self.num_characters > MOST_TEMPLATE_CHARACTERS:
            raise ValueError("it writes or repeats too much")
        return self.observe


def _encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    where: str,
    *,
    keep_special: bool,
    ended: bool = True,
) -> tuple[list[int], list[bool]]:
    """(ids, answer mask) of a conversation in the chat template, encoded turn by turn.

    The mask covers every assistant turn and the tokens that end it; the last one ends with its text if it has not
    `ended`. A conversation that ends before an answer ends with the template's generation prompt, in the same ids that
    it has when the answer follows.
    """
    require_chat_template(tokenizer)
    special = special_tokens_of(tokenizer)
    marks = None if keep_special else special
    cuts = [(end, kind) for end, m in enumerate(messages) if m.role == "assistant" for kind in ("before", "answer")]
    if messages[-1].role != "assistant":
        cuts.append((len(messages), "before"))
    parts: list[str] = []
    text = ""
    for end, kind in cuts:
        answered = kind == "answer"
        longer = chat_text(tokenizer, messages[: end + answered], marks, generation=not answered)
        if not longer.startswith(text):
            raise DataError(
                f"{where}: the chat template rewrites earlier turns, so the tokens of each turn are unknown. "
                "Split the conversation into rows with one answer each"
            )
        parts.append(longer[len(text) :])
        text = longer
    if not ended:
        content = messages[-1].content if marks is None else marks.protect(messages[-1].content)
        own = next((form for form in (content, content.strip()) if form in parts[-1]), content)
        parts[-1] = parts[-1].rpartition(own)[0] + own
    ids: list[int] = []
    answer_mask: list[bool] = []
    for part, (_, kind) in zip(special.encode(parts, add_special_tokens=False), cuts, strict=True):
        ids += part
        answer_mask += [kind == "answer"] * len(part)
    return ids, answer_mask


def _encode_conversation(
    tokenizer: PreTrainedTokenizerBase, row: Demonstration, *, keep_special: bool
) -> tuple[list[int], list[bool]]:
    ids, answer_mask = _encode_turns(tokenizer, row.messages, row.where, keep_special=keep_special, ended=row.ended)
    eos = int(tokenizer.eos_token_id)
    if not row.ended:
        return ids, answer_mask
    before = len(ids) - last_run(answer_mask)
    answer = cut_behind_eos(ids[before:], eos)
    # Most templates end a turn with EOS. If one does not, append it.
    answer = answer if answer[-1:] == [eos] else [*answer, eos]
    return ids[:before] + answer, answer_mask[:before] + [True] * len(answer)
