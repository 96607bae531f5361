"""The tokens of models: new ones with their embeddings, and whether two models read the same ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.models.forward import vocabulary_rows
from rlhf_cli.models.load import same_tokenizer
from rlhf_cli.seeding import seeded

NUM_SHOWN = 3
"""Tokens that a message lists at most."""


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], key: str) -> None:
    """Make each text one special token. Raises ConfigError, naming the config `key`, if one is a token already."""
    if not tokens:
        return
    vocabulary = set(tokenizer.get_vocab())
    for token in tokens:
        if token in vocabulary:
            raise ConfigError(f"{key}: {token!r} is a token already. Remove it")
        vocabulary.add(token)
    tokenizer.add_special_tokens({"extra_special_tokens": list(tokens)}, replace_extra_special_tokens=False)


@torch.no_grad()
def embed_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], key: str
) -> str | None:
    """Give each new token the mean embedding of the others, also in the output head; returns a line for the user.

    From the mean, new tokens change the probabilities of the others least (Hewitt 2021). The table grows only if it has
    no unused rows. Raises ConfigError, naming the config `key`, if the embeddings are frozen.
    """
    if not tokens:
        return None
    if not model.get_input_embeddings().weight.requires_grad:
        raise ConfigError(f"{key}: the embeddings are frozen, so the new tokens would not be learned. Change freeze")
    vocabulary = tokenizer.get_vocab()
    new = [vocabulary[token] for token in tokens]
    old = sorted(set(vocabulary.values()) - set(new))
    if len(tokenizer) > vocabulary_rows(model):
        with seeded(0, "new tokens"):
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    head = model.get_output_embeddings()
    for table in (model.get_input_embeddings().weight, *(head.parameters() if head is not None else ())):
        table[new] = table[old].mean(0)
    return f"{key}: {len(new)} new tokens with the ids {min(new)} to {max(new)}; {vocabulary_rows(model):,} embeddings"


def require_same_tokens(
    policy_tokenizer: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase, path: str, key: str
) -> None:
    """Raise ArtifactError if the model at `path`, of the config `key`, cannot read the policy's token ids."""
    if same_tokenizer(policy_tokenizer, tokenizer):
        return
    vocabulary, ids = tokenizer.get_vocab(), policy_tokenizer.get_vocab()
    unknown = sorted((token for token, i in ids.items() if vocabulary.get(token) != i), key=ids.__getitem__)
    what = "encodes text in other ids than the policy, or has another EOS"
    if unknown:
        shown = ", ".join([*map(repr, unknown[:NUM_SHOWN]), *["..."] * (len(unknown) > NUM_SHOWN)])
        what = f"does not know {len(unknown):,} of the policy's tokens ({shown})"
    raise ArtifactError(
        f"{key}: {path} {what}, and it has to read the policy's ids. Use a model with the policy's tokenizer"
    )


def require_template_tokens(
    template: str | None, policy_tokenizer: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Raise ConfigError if the prompt template has a token that the reward model knows and the policy does not.

    The reward model reads the policy's ids: it would get the characters of the token.
    """
    for token in sorted(tokenizer.get_added_vocab().keys() - policy_tokenizer.get_vocab().keys()):
        if token in (template or ""):
            raise ConfigError(
                f"data.prompt_template: {token!r} is a token of the reward model ({name}) and not of the policy. Start "
                "from a policy that was trained with it (model.add_tokens of the SFT stage)"
            )
