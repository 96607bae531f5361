"""Beam search and contrastive search, by `generate` of transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.modeling_outputs import BaseModelOutput

from rlhf_cli.models.seq2seq import encoder_inputs, is_seq2seq, start_of_response
from rlhf_cli.processes.sharding import device_of
from rlhf_cli.rollout.distribution import Response
from rlhf_cli.rollout.sampling import stop_string_start
from rlhf_cli.rollout.speaker import Speaker


def search(
    speaker: Speaker,
    ids: list[int],
    limit: int,
    *,
    num_beams: int = 1,
    penalty_alpha: float | None = None,
    num_candidates: int = 4,
) -> Response:
    """The response of at most `limit` tokens that a search finds: by beams or, with `penalty_alpha`, contrastive.

    One prompt at a time: padding would change the last bits.
    """
    model, sampling = speaker.model, speaker.sampling
    stops, strings = sorted(sampling.stop), list(sampling.stop_strings)
    config = GenerationConfig(
        num_beams=num_beams,
        do_sample=False,
        max_new_tokens=limit,
        min_new_tokens=sampling.min_new_tokens or None,
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        eos_token_id=stops,
        pad_token_id=stops[0],
    )
    method: dict[str, Any] = {}
    if penalty_alpha is not None:
        method["custom_generate"] = functools.partial(
            contrastive_search, penalty_alpha=penalty_alpha, num_candidates=num_candidates
        )
    prompt, num_before = torch.tensor([ids], device=device_of(model)), len(ids)
    if is_seq2seq(model):
        # Its output begins with the decoder's start token.
        prompt, num_before = encoder_inputs(model, [prompt[0]])[0], 1
        config.decoder_start_token_id = start_of_response(model)
    with speaker.autocast():
        output: Tensor = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([StopStringCriteria(speaker.tokenizer, strings)] if strings else []),
            **method,
        )
    new = output[0, num_before:].tolist()
    end = next((n for n, token in enumerate(new, 1) if token in sampling.stop), None)
    new = new[:end]
    stopped = bool(strings) and stop_string_start(speaker.tokenizer, new, sampling.stop_strings) is not None
    return Response(new, [], end is not None or stopped)


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
