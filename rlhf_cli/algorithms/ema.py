"""The exponential moving average of a model's weights."""

import torch


def ema(average: torch.Tensor, value: torch.Tensor, *, decay: float) -> torch.Tensor:
    """One step of an exponential moving average.

    ``decay * average + (1 - decay) * value``

    decay is the weight that is *kept*; some libraries name the weight of the new value instead (TRL's
    ref_model_mixup_alpha is 1 - decay). In bfloat16 a decay near 1 changes nothing at all, since the step is
    smaller than the spacing of the numbers: keep the average in float32.

    Args:
        average: any shape.
        value: the same shape.
        decay: 0 to 1; 0 is the value itself, 1 the average as it was.

    Returns:
        A new tensor of that shape; average isn't changed.

    >>> ema(torch.tensor([1.0]), torch.tensor([5.0]), decay=0.75)
    tensor([2.])
    """
    return decay * average + (1 - decay) * value
