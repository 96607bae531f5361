"""The language-model loss: the loss of SFT, and of PPO-ptx beside the policy loss."""

import torch
from torch import Tensor

from rlhf_cli.tensor_ops import masked_sum


def lm_loss(
    token_logprobs: Tensor, mask: Tensor | None = None, *, num_tokens: Tensor | float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the target tokens.

    ``loss = sum(-token_logprobs) / num_tokens``

    It is a mean over tokens, so long texts weigh more than short ones. Averaging the means of two microbatches of
    unequal length would give another number; with num_tokens the parts add up to the right one.

    Args:
        token_logprobs: any shape, [N] for packed rows: of each next token, as from ``tensor_ops.token_logprobs`` at
            temperature 1; carries the gradient.
        mask: the same shape, bool, True on target tokens, EOS among them; elsewhere token_logprobs may hold anything.
            None: every token is a target.
        num_tokens: divisor of the sum, by default the number of target tokens. For a microbatch, pass the number in
            its whole minibatch: then losses, gradients and stats *add up*.

    Returns:
        (loss, stats): a scalar to minimise, and ``lm/nll``, the same detached, in nats per token. A mask without any
        True gives 0 with num_tokens and NaN without.

    >>> logprobs = torch.tensor([0.5, 0.25, 0.001]).log()
    >>> loss, stats = lm_loss(logprobs, torch.tensor([True, True, False]))
    >>> loss  # (log(2) + log(4)) / 2
    tensor(1.0397)
    """
    mask = torch.ones_like(token_logprobs, dtype=torch.bool) if mask is None else mask
    num_tokens = mask.sum() if num_tokens is None else num_tokens
    loss = -masked_sum(token_logprobs, mask) / num_tokens
    return loss, {"lm/nll": loss.detach()}
