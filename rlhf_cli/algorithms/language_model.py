"""The loss of a language model on text that it is to imitate: in SFT, and beside PPO."""

import torch
from torch import Tensor

from rlhf_cli.tensor_ops import masked_sum


def lm_loss(
    token_logprobs: Tensor, mask: Tensor | None = None, *, num_tokens: Tensor | float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the tokens to be learnt.

    ``loss = sum(-token_logprobs) / num_tokens``

    It is a mean over tokens, so a long text weighs more than a short one. The mean of the means of two
    microbatches of unequal length is another number; with num_tokens the parts add up to the right one.

    Args:
        token_logprobs: any shape, [N] for packed rows: of each next token, as from
            ``tensor_ops.token_logprobs`` at temperature 1; carries the gradient.
        mask: the same shape, bool, True on the tokens to be learnt, EOS among them; where it is False
            token_logprobs may be anything at all. None learns them all.
        num_tokens: what the sum is divided by, by default the number of tokens to be learnt. Give a
            microbatch the number in its whole minibatch: then losses, gradients and stats *add up*.

    Returns:
        (loss, stats): a scalar to minimise, and ``lm/nll``, the same detached: nats a token. A mask that is
        False throughout gives 0 with num_tokens and nan without.

    >>> logprobs = torch.tensor([0.5, 0.25, 0.001]).log()
    >>> loss, stats = lm_loss(logprobs, torch.tensor([True, True, False]))
    >>> loss  # (log(2) + log(4)) / 2
    tensor(1.0397)
    """
    mask = torch.ones_like(token_logprobs, dtype=torch.bool) if mask is None else mask
    num_tokens = mask.sum() if num_tokens is None else num_tokens
    loss = -masked_sum(token_logprobs, mask) / num_tokens
    return loss, {"lm/nll": loss.detach()}
