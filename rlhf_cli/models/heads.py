"""Scalar heads: the `score` layer of reward and value models, and models that share the policy's backbone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from rlhf_cli.errors import ArtifactError
from rlhf_cli.models.forward import TOLERANCE
from rlhf_cli.models.seq2seq import class_of_family, end_of_text


class ScalarHead(GenericForSequenceClassification):
    """A backbone with a linear layer `score` without bias: the parent of the classifiers of `offer_classifier`."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> SequenceClassifierOutput:
        """The scores at the last token of each row, [B, labels]. Padding is on the right, 0 in `attention_mask`.

        transformers' own forward expects a cache in the output, and Mamba has none.
        """
        hidden = getattr(self, self.base_model_prefix)(
            input_ids, attention_mask=attention_mask, **options
        ).last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = torch.arange(len(input_ids), device=hidden.device)
        return SequenceClassifierOutput(logits=self.score(hidden[rows, mask.sum(1) - 1]))


def offer_classifier(config: type[PreTrainedConfig]) -> None:
    """Give AutoModelForSequenceClassification a class for a causal language model that has none (CodeGen, Mamba).

    transformers alone cannot load a directory of such a model.
    """
    if config in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or config not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    model = class_of_family(MODEL_FOR_CAUSAL_LM_MAPPING[config], config, ScalarHead, "ForSequenceClassification")
    AutoModelForSequenceClassification.register(config, model, exist_ok=True)


def reads_last_token(model: PreTrainedModel) -> bool:
    """Whether the model is a causal backbone with a linear `score` head, read at the last real token."""
    return isinstance(getattr(model, "score", None), torch.nn.Linear)


def is_encoder(model: PreTrainedModel) -> bool:
    """Whether the model is an encoder's classifier. Its passes are in float32 whatever the precision."""
    return model.get_output_embeddings() is None and not reads_last_token(model)


def scalar_heads(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """The linear layers outside the backbone whose outputs are the labels, by name; none of a language model."""
    if model.get_output_embeddings() is not None:
        return {}
    backbone = set(model.base_model.modules())
    return {
        name: module
        for name, module in model.named_modules()
        if module not in backbone
        and isinstance(module, torch.nn.Linear)
        and module.out_features == model.config.num_labels
    }


def start_head(head: torch.nn.Linear, std: float = 0.0) -> None:
    """Give a scalar head random weights of this standard deviation, and no bias."""
    torch.nn.init.normal_(head.weight, std=std) if std else torch.nn.init.zeros_(head.weight)
    if head.bias is not None:
        torch.nn.init.zeros_(head.bias)


def value_model_like(policy: PreTrainedModel) -> PreTrainedModel:
    """A sequence classifier with one label on a backbone of the policy's shape, without memory for its weights.

    Raises ArtifactError if transformers has none with the same weights.
    """
    offer_classifier(type(policy.config))
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError:
        model = policy
    # A quantized weight has more entries (`.weight.*`), and one under adapters a further part in its name.
    names = {name.replace("base_layer.", "") for name in policy.base_model.state_dict() if ".lora_" not in name}
    if not reads_last_token(model) or model.base_model.state_dict().keys() != {n for n in names if ".weight." not in n}:
        raise ArtifactError(
            f"value_model.init: shared: transformers has no sequence classifier on the backbone of a "
            f"{type(policy).__name__}, so the value model could not be saved. Set value_model.init: policy, or choose "
            "a ppo.advantage_estimator without a value model"
        )
    return model


@torch.no_grad()
def require_scores_without_padding(model: PreTrainedModel) -> None:
    """Raise ArtifactError if padding after a text changes its score, as in XLNet, which reads the last position."""
    embeddings: Any = model.get_input_embeddings()
    text = [(7 * i + 3) % len(embeddings.weight) for i in range(5)]
    if model.config.is_encoder_decoder:
        text[-1] = end_of_text(model)  # where its score is read
    ids = torch.tensor([text + [model.config.pad_token_id or 0] * 4], device=model.device)  # [1, 9]
    real_mask = torch.tensor([[1] * 5 + [0] * 4], device=model.device)
    padded = model(input_ids=ids, attention_mask=real_mask).logits.float()
    alone = model(input_ids=ids[:, :5], attention_mask=real_mask[:, :5]).logits.float()
    gap = ((padded - alone).abs().max() / alone.abs().max().clamp_min(1.0)).item()
    if not gap <= TOLERANCE:
        raise ArtifactError(
            f"{type(model).__name__}: padding after a text changes its score by {gap:.1e}, so the score would depend "
            "on the other texts of the batch. Use a reward model of another family"
        )
