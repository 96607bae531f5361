"""Contrastive search: likely tokens whose hidden states differ from those of all tokens before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput


def contrastive_search(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    *,
    penalty_alpha: float,
    num_candidates: int,
    past_key_values: object = None,
    encoder_outputs: BaseModelOutput | None = None,
    **_: Any,
) -> Tensor:
    """Extend one sequence by contrastive search, as a decoding method for `custom_generate` of transformers.

    Each step takes the most likely `num_candidates` tokens v and appends the one with the highest

        ``(1 - penalty_alpha) * p(v) - penalty_alpha * max_j cos(h_v, h_j)``

    where h_v is the last hidden state of v and j runs over all tokens before it, the prompt included. Su et al. 2022,
    "A Contrastive Framework for Neural Text Generation" (arXiv 2202.06417), equation 5.

    Args:
        input_ids: [1, N]; the prompt, or the start token of an encoder-decoder.
        past_key_values: the empty cache that transformers made.

    Returns:
        [1, N + the new tokens].
    """
    assert isinstance(past_key_values, DynamicCache | EncoderDecoderCache)
    logits, before = _forward(model, input_ids, past_key_values, encoder_outputs)
    while True:
        probs = logits_processor(input_ids, logits[:, -1].float()).softmax(-1)  # type: ignore[arg-type]
        p, candidates = probs[0].topk(min(num_candidates, probs.shape[1]))  # [K]
        # One row for each candidate. Then only the row of the chosen one stays in the cache.
        past_key_values.batch_repeat_interleave(len(candidates))
        logits, hidden = _forward(model, candidates[:, None], past_key_values, encoder_outputs)
        similarity = torch.cosine_similarity(hidden.float(), before.float(), dim=-1).amax(-1)  # [K, N] -> [K]
        # A filter may leave fewer tokens than candidates. The others have a probability of 0.
        score = ((1 - penalty_alpha) * p - penalty_alpha * similarity).where(p > 0, -torch.inf)
        best = score.argmax().view(1)
        input_ids = torch.cat([input_ids, candidates[best][None]], dim=1)
        if stopping_criteria(input_ids, None).all():
            return input_ids
        past_key_values.batch_select_indices(best)
        logits, before = logits[best], torch.cat([before, hidden[best]], dim=1)


def _forward(
    model: PreTrainedModel, ids: Tensor, cache: DynamicCache | EncoderDecoderCache, encoder: BaseModelOutput | None
) -> tuple[Tensor, Tensor]:
    """Logits [B, n, V] and last hidden states [B, n, H] of `ids` [B, n], which are appended to the cache."""
    given: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "output_hidden_states": True}
    if encoder is None:
        out = model(input_ids=ids, **given)
        return out.logits, out.hidden_states[-1]
    states = encoder.last_hidden_state
    assert states is not None
    rows = BaseModelOutput(last_hidden_state=states.expand(len(ids), -1, -1))
    out = model(decoder_input_ids=ids, encoder_outputs=rows, **given)
    return out.logits, out.decoder_hidden_states[-1]
