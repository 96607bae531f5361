"""`rlhf data generate --task dialogues`: one model answers, and a second one plays the user (Ding et al. 2023).

Each dialogue starts with a prompt of the source. The two models then write in turn, all dialogues of a chunk together.
The first model reads the dialogue as messages. The second one reads it as text in a template, because a chat model
writes answers, and few can write the user's side of a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_cli.commands.output import Dropped, Outcome
from rlhf_cli.commands.writer import Failure, Request, Writer, fill
from rlhf_cli.data.records import Message, Record, turns_of

USER_TEMPLATE = """\
Below is a conversation between a person and an assistant.

{dialogue}

Write what the person says next: a question or a remark that follows from the conversation, in the words of someone \
who needs help. Write only this one message, and nothing else.
"""
NAMES = {"user": "Person", "assistant": "Assistant"}


@dataclass
class _Dialogue:
    """One dialogue while it is written. It ends early where a model has nothing to say or is cut."""

    number: int
    messages: list[Message]
    num_given: int = field(init=False)
    """Messages from the source. A dialogue without a further one has no answer."""
    ended: bool = True
    """False if its last answer was cut."""
    failure: Failure | None = None
    is_open: bool = True

    def __post_init__(self) -> None:
        self.num_given = len(self.messages)


def write_dialogues(
    assistant: Writer,
    user: Writer,
    numbered: Sequence[tuple[int, Record]],
    num_turns: int,
    template: str,
    origin: dict[str, Any],
) -> list[Outcome]:
    """A row of `messages` for each record: its prompt, then up to `num_turns` answers with messages of `user` between.

    Every dialogue ends with an answer, and every row with the columns of `origin`. A Failure that ends the run takes
    the place of the row.
    """
    dialogues = [_Dialogue(n, list(r.messages or (Message("user", r.prompt),))) for n, r in numbered]
    for turn in range(num_turns):
        if turn:
            _let_user_speak(dialogues, user, turn, template)
        _let_assistant_answer(dialogues, assistant, turn)
    return [_outcome(dialogue, origin) for dialogue in dialogues]


def _let_assistant_answer(dialogues: Sequence[_Dialogue], assistant: Writer, turn: int) -> None:
    still_open = [dialogue for dialogue in dialogues if dialogue.is_open]
    requests = [Request(tuple(dialogue.messages), (dialogue.number, turn, 0)) for dialogue in still_open]
    for dialogue, answer in zip(still_open, assistant.write(requests), strict=True):
        if isinstance(answer, Failure) or not answer.text.strip():
            dialogue.failure = answer if isinstance(answer, Failure) else None
            dialogue.is_open = False
            if turn:
                dialogue.messages.pop()  # the user's message, which has no answer
            continue
        dialogue.messages.append(Message("assistant", answer.text.strip()))
        # An answer that was cut is the last one: SFT learns every answer, and would learn to stop in mid-sentence.
        dialogue.ended = dialogue.is_open = answer.ended


def _let_user_speak(dialogues: Sequence[_Dialogue], user: Writer, turn: int, template: str) -> None:
    still_open = [dialogue for dialogue in dialogues if dialogue.is_open]
    requests = [Request.of(fill(template, dialogue=as_text(d.messages)), d.number, turn, 1) for d in still_open]
    for dialogue, answer in zip(still_open, user.write(requests), strict=True):
        text = "" if isinstance(answer, Failure) else next_message(answer.text, ended=answer.ended)
        if text:
            dialogue.messages.append(Message("user", text))
        else:
            dialogue.failure = answer if isinstance(answer, Failure) else None
            dialogue.is_open = False


def _outcome(dialogue: _Dialogue, origin: dict[str, Any]) -> Outcome:
    has_answer = len(dialogue.messages) > dialogue.num_given
    if dialogue.failure is not None and (dialogue.failure.fatal or not has_answer):
        return dialogue.failure
    if not has_answer:
        return Dropped("empty answers")
    return {"messages": turns_of(dialogue.messages), "ended": dialogue.ended, **origin}


def as_text(messages: Sequence[Message]) -> str:
    """A dialogue for the template, without the system's message."""
    return "\n\n".join(f"{NAMES[m.role]}: {m.content.strip()}" for m in messages if m.role in NAMES)


def next_message(text: str, *, ended: bool) -> str:
    """The first message in what a model wrote for the user, or "" if it was cut there.

    It may have a name before it and the rest of a conversation after it.

    >>> next_message(" Person: Thanks! And on Sunday?\\n\\nAssistant: Closed on", ended=False)
    'Thanks! And on Sunday?'
    >>> next_message("Thanks! And on", ended=False)
    ''
    """
    message, *more = re.split(rf"\n(?:{'|'.join(NAMES.values())}):", text.strip().removeprefix(f"{NAMES['user']}:"))
    return message.strip() if ended or more else ""
