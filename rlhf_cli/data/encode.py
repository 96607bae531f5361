"""Text to token ids, for the policy and for the models that judge it."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from rlhf_cli.data.paths import reason
from rlhf_cli.data.records import Message, Record
from rlhf_cli.data.special_tokens import SpecialTokens, cut_behind_eos, special_tokens_of
from rlhf_cli.errors import ArtifactError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Side = Literal["left", "right"]
"""The side of a sequence that is cut."""
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
class LengthLimits:
    """The length limits of a token sequence, and how to treat a longer one (`Data` documents each field)."""

    max_length: int
    truncation: Literal["drop", "left", "right"] = "drop"
    min_response_length: int = 0

    @property
    def too_short(self) -> Skipped:
        return Skipped(f"answers of fewer than {self.min_response_length} tokens")


def fit(
    ids: list[int], answer_mask: list[bool], limits: LengthLimits, bos: int | None
) -> tuple[list[int], list[bool]] | Skipped:
    """Cut a sequence and its answer mask to `limits.max_length`.

    `left` keeps a first token that is `bos`, the whole last answer, and at least one token before it. `right` keeps at
    least one token of an answer. A sequence that cannot be cut that way is skipped.

    >>> fit([0, 5, 6, 7, 8], [False, False, False, True, True], LengthLimits(4, "left"), bos=0)
    ([0, 6, 7, 8], [False, False, True, True])
    >>> fit([5, 6, 7, 8], [False, True, True, True], LengthLimits(3, "left"), bos=None)
    Skipped(reason='longer than 3 tokens, and so is its answer', needs=4)
    """
    if sum(answer_mask) < limits.min_response_length:
        return limits.too_short
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
    if (num_answer := last_run(answer_mask)) >= longest:
        return Skipped(f"longer than {longest} tokens, and so is its answer", needs=num_answer + 1)
    num_first = int(ids[0] == bos and longest > 1)
    return cut(ids, longest, "left", bos), [False] * num_first + answer_mask[len(ids) - longest + num_first :]


def fit_prompt(ids: list[int], limits: LengthLimits, bos: int | None) -> list[int] | Skipped:
    """Cut a prompt to `limits.max_length`. `left` keeps a first token that is `bos`."""
    longest, side = limits.max_length, limits.truncation
    if side == "drop":
        return ids if len(ids) <= longest else Skipped(f"prompts longer than {longest} tokens", needs=len(ids))
    return cut(ids, longest, side, bos)


def cut(ids: list[int], longest: int, side: Side, bos: int | None) -> list[int]:
    """The ids, of which at most `longest` are left. `left` keeps a first token that is `bos`.

    >>> cut([1, 2, 3, 4], 3, "left", bos=1), cut([1, 2, 3, 4], 3, "left", None), cut([1, 2, 3, 4], 3, "right", None)
    ([1, 3, 4], [2, 3, 4], [1, 2, 3])
    """
    if len(ids) <= longest or side == "right":
        return ids[:longest]
    first = ids[:1] if ids[0] == bos and longest > 1 else []
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


@dataclass(frozen=True)
class RowText:
    """Rows as a model reads them: as text, and as token ids."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    """`data.prompt_template`."""
    keep_special: bool = False
    """Special tokens in the rows' own text stay special (`data.special_tokens: keep`)."""

    def __post_init__(self) -> None:
        if self.template == "chat" and not self.tokenizer.chat_template:
            found = "data.prompt_template: chat, but the tokenizer has no chat template"
            raise DataError(f"{found}. Write one with {{prompt}}")

    @property
    def marks(self) -> SpecialTokens | None:
        """Marks special tokens in the rows' own text, for `SpecialTokens.encode`. None if they stay special."""
        return None if self.keep_special else special_tokens_of(self.tokenizer)

    def is_chat(self, row: Record) -> bool:
        """Is a row written in the chat template? A conversation is, if the tokenizer has one."""
        template = self.template
        return bool(row.messages) and (template == "chat" or (template is None and bool(self.tokenizer.chat_template)))

    def prompt(self, row: Record, *, marked: bool = False) -> str:
        """The text before the answer. To be encoded, it has the special tokens of the row's own text `marked`."""
        marks = self.marks if marked else None
        if self.is_chat(row) or self.template == "chat":
            messages = row.messages or [Message("user", row.prompt)]
            return chat_text(self.tokenizer, messages, marks, generation=True)
        before, _, after = (self.template or "{prompt}").partition("{prompt}")
        if marks is None:
            return before + row.prompt + after
        return marks.join(marks.join(before, marks.protect(row.prompt)), after)

    def whole(self, row: Record) -> str:
        """Prompt and response as one text, for a model that tokenises the two together, to be encoded."""
        marks = self.marks
        if self.is_chat(row):
            return chat_text(self.tokenizer, row.turns, marks, generation=False)
        prompt = self.prompt(row, marked=True)
        return prompt + row.response if marks is None else marks.join(prompt, marks.protect(row.response))

    def prompt_ids(self, rows: Sequence[Record], *, start: bool = True) -> list[list[int]]:
        """The ids that a response to each row follows, the same that SFT has before the row's last answer.

        They lack the EOS that some tokenizers append to every text (T5, some Llamas). With `start`, an empty prompt
        becomes BOS (or EOS if there is no BOS), so that a token predicts the first one.
        """
        texts = {n: self.prompt(row, marked=True) for n, row in enumerate(rows) if not self.is_chat(row)}
        different = list(dict.fromkeys(texts.values()))  # the answers of a ranking share their prompt
        special, is_whole = special_tokens_of(self.tokenizer), self.template != "chat"
        encoded = special.encode(different, add_special_tokens=is_whole)
        ids_of = dict(zip(different, encoded, strict=True))
        eos, bos = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        found = []
        for n, row in enumerate(rows):
            if n not in texts:
                found.append(self._turns(row.messages)[0])
                continue
            ids = ids_of[texts[n]]
            bare = ids[:-1] if is_whole and len(ids) > 1 and special.appends_eos else [*ids]
            found.append(bare or ([int(eos if bos is None else bos)] if start else []))
        return found

    def answer_ids(self, rows: Sequence[Record], *, start: bool = True) -> list[tuple[list[int], list[bool]]]:
        """(ids, answer mask) of each row with its first answer. The mask has EOS, and each assistant turn of a chat.

        A rollout starts from the same ids of the prompt, and the answer has the rest of the whole text's ids. If the
        tokenizer merges characters across the boundary, the answer is encoded by itself instead, because a policy can
        only continue after the prompt's ids. An answer that was cut (`ended` is false) gets no EOS: the model would
        learn to stop where the cut was.
        """
        eos, special = int(self.tokenizer.eos_token_id), special_tokens_of(self.tokenizer)
        plain = [row for row in rows if not self.is_chat(row)]
        texts = [self.whole(row) for row in plain]
        prompts = iter(self.prompt_ids(plain, start=start))
        wholes = iter(special.encode(texts, add_special_tokens=self.template != "chat"))
        found = []
        for row in rows:
            if self.is_chat(row):
                found.append(self._turns(row.turns, ended=row.answers[0].ended))
                continue
            prompt, whole = next(prompts), next(wholes)
            answer = (whole[:-1] if whole[-1:] == [eos] else whole)[len(prompt) :]
            if whole[: len(prompt)] != prompt or not answer:
                text = row.response if self.keep_special else special.protect(row.response)
                answer = special.encode([text], add_special_tokens=False)[0]
            answer = [*answer, eos] if row.answers[0].ended else answer
            found.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
        return found

    def _turns(self, messages: Sequence[Message], *, ended: bool = True) -> tuple[list[int], list[bool]]:
        """(ids, answer mask) of a conversation in the chat template, encoded turn by turn.

        The mask covers every assistant turn and the tokens that end it. A last one ends with EOS, or with its text if
        it has not `ended`. A conversation that ends before an answer ends with the template's generation prompt, in
        the same ids that it has when the answer follows.
        """
        marks = self.marks
        # (end of the part in messages, is it an answer?)
        cuts = [(end, kind) for end, m in enumerate(messages) if m.role == "assistant" for kind in (False, True)]
        if messages[-1].role != "assistant":
            cuts.append((len(messages), False))
        parts: list[str] = []
        text = ""
        for end, is_answer in cuts:
            longer = chat_text(self.tokenizer, messages[: end + is_answer], marks, generation=not is_answer)
            if not longer.startswith(text):
                found = "the chat template rewrites earlier turns, so the tokens of each turn are unknown"
                raise DataError(f"{found}. Split the conversation into rows with one answer each")
            parts.append(longer[len(text) :])
            text = longer
        if not ended:
            content = messages[-1].content if marks is None else marks.protect(messages[-1].content)
            own = next((form for form in (content, content.strip()) if form in parts[-1]), content)
            parts[-1] = parts[-1].rpartition(own)[0] + own
        ids: list[int] = []
        answer_mask: list[bool] = []
        encoded = special_tokens_of(self.tokenizer).encode(parts, add_special_tokens=False)
        for part, (_, is_answer) in zip(encoded, cuts, strict=True):
            ids += part
            answer_mask += [is_answer] * len(part)
        if messages[-1].role != "assistant" or not ended:
            return ids, answer_mask
        eos = int(self.tokenizer.eos_token_id)
        before = len(ids) - last_run(answer_mask)
        answer = cut_behind_eos(ids[before:], eos)
        # Most templates end a turn with EOS. If one does not, append it.
        answer = answer if answer[-1:] == [eos] else [*answer, eos]
        return ids[:before] + answer, answer_mask[:before] + [True] * len(answer)


def encode_for_classifier(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int | None, side: Side = "left"
) -> list[list[int]]:
    """Encode whole texts with the special tokens that an encoder model expects.

    A text longer than `max_length` is cut at `side`: the response to judge is at its end. Special tokens that
    `SpecialTokens.protect` marked are read as text.
    """
    return special_tokens_of(tokenizer).encode(texts, add_special_tokens=True, max_length=max_length, side=side)


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
            sys.settrace(_limits())
        text = str(tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generation))
        _rendered.add(template)
        return text
    except Exception as error:
        # The template is a program that comes with the tokenizer. It runs in a sandbox and may raise anything.
        found = f"the tokenizer's chat template fails: {reason(error)}"
        raise DataError(f"{found}. Correct the conversation, or give data.prompt_template") from None
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


def _limits() -> Any:
    """A trace function that ends a chat template that writes or repeats too much. Its sandbox limits neither."""
    num_lines = num_characters = 0

    def observe(_frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines, num_characters
        num_lines += event == "line"
        num_characters += len(argument) if event == "return" and isinstance(argument, str) else 0
        if num_lines > MOST_TEMPLATE_LINES or num_characters > MOST_TEMPLATE_CHARACTERS:
            raise ValueError("it writes or repeats too much")
        return observe

    return lambda frame, _event, _argument: observe if frame.f_code.co_filename == "<template>" else None
