"""vLLM as a rollout engine, on the GPU of the policy.

Written for vLLM 0.33 by its documentation and source (docs.vllm.ai: training/weight_transfer, LLM, SamplingParams). It
has not been run: no machine with a GPU was at hand.

Weights go by CUDA IPC from this process to vLLM's, in pieces (`WeightTransferConfig(backend="ipc")`). Between rollouts
vLLM sleeps: at level 2 it frees weights, keys and values, at level 1 it keeps its weights in the memory of the CPU.
Prompts and responses are token ids on both sides, so nothing is tokenized again.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_cli.errors import ConfigError
from rlhf_cli.models.save import plain_weights
from rlhf_cli.rollout.distribution import Response, Sampling
from rlhf_cli.rollout.engine import Checksum, checksum

PIECE = 2**28
"""Bytes of weights that are sent at a time, unless one tensor is larger."""


class VllmEngine:
    """See `Engine` for its methods."""

    name = "vllm"

    def __init__(
        self, policy: PreTrainedModel, *, dtype: torch.dtype, longest: int, memory: float, keeps_weights: bool
    ):
        """longest: tokens of the longest text. memory: share of the GPU's memory for vLLM while it samples.

        keeps_weights: whether the weights are needed again after a sleep.

        Raises ConfigError if vLLM does not start.
        """
        # Handles of GPU memory, and the function that reads checksums, go to vLLM's process as pickles.
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        import vllm
        from vllm.config import WeightTransferConfig

        self.dtype, self._level = dtype, 1 if keeps_weights else 2
        self._is_asleep = self._holds_weights = False
        self._types = vllm
        with tempfile.TemporaryDirectory() as directory:
            _config_of(policy, dtype).save_pretrained(directory)
            try:
                self._llm = vllm.LLM(
                    model=directory,
                    load_format="dummy",  # the weights are sent
                    skip_tokenizer_init=True,
                    generation_config="vllm",
                    dtype=str(dtype).removeprefix("torch."),
                    max_model_len=longest,
                    gpu_memory_utilization=memory,
                    enable_sleep_mode=True,
                    logprobs_mode="processed_logprobs",
                    weight_transfer_config=WeightTransferConfig(backend="ipc"),
                )
            except (RuntimeError, ValueError, OSError) as error:
                reason = " ".join(str(error).split())[:300]
                raise ConfigError(
                    f"rollout.engine: vllm does not start: {reason}. Lower rollout.engine_memory if memory is short, "
                    "or set rollout.engine: own"
                ) from None
        self._sender = _sender(self._llm, policy, dtype)

    def wake(self) -> bool:
        if self._is_asleep:
            # Keys and values come back in `sample`, so that weights can be sent into memory that they will fill.
            self._llm.wake_up(tags=["weights"])
        return self._holds_weights

    def load(self, policy: PreTrainedModel) -> None:  # noqa: ARG002
        self._sender.send_weights()  # start_weight_update, update_weights for each piece, finish_weight_update
        self._holds_weights = True
        self._llm.reset_prefix_cache()  # its keys and values are those of the old weights

    def sample(self, prompts: Sequence[Sequence[int]], uniforms: Tensor, sampling: Sampling) -> list[Response]:
        if self._is_asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        outputs = self._llm.generate(
            [self._types.TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts],
            [
                self._types.SamplingParams(
                    temperature=sampling.temperature,
                    max_tokens=uniforms.shape[1],
                    # vLLM counts the tokens before the stop token, `min_new_tokens` includes it.
                    min_tokens=max(0, sampling.min_new_tokens - 1),
                    stop_token_ids=sorted(sampling.stop),
                    ignore_eos=True,  # `stop` has every token that ends a response
                    logprobs=0,  # that of the sampled token
                    seed=seed_of(row),
                    detokenize=False,
                )
                for row in uniforms
            ],
            use_tqdm=False,
        )
        return [_response(output.outputs[0], sampling) for output in outputs]

    def checksums(self) -> Mapping[tuple[str, ...], Checksum]:
        held: dict[tuple[str, ...], Checksum]
        [held] = self._llm.apply_model(held_checksums)
        return held

    def sleep(self) -> None:
        self._llm.sleep(level=self._level)
        self._is_asleep = True
        self._holds_weights &= self._level == 1


def seed_of(uniforms: Tensor) -> int:
    """A seed below 2**48 from the first two uniforms of a row, which have 24 bits each."""
    first, *others = (int(x * 2**24) for x in uniforms[:2].tolist())
    return first + sum(other << 24 for other in others)


def _response(output: Any, sampling: Sampling) -> Response:
    """A response from a CompletionOutput of vLLM."""
    ids = list(output.token_ids)
    logprobs = [float(at[token].logprob) for at, token in zip(output.logprobs, ids, strict=True)]
    return Response(ids, logprobs, ended=ids[-1] in sampling.stop)


def held_checksums(model: Any) -> dict[tuple[str, ...], Checksum]:
    """The checksums of a model of vLLM; runs in vLLM's process.

    vLLM joins some layers, such as q_proj, k_proj and v_proj to qkv_proj. Its class names them.
    """
    joined: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    found = {}
    for name, weight in model.named_parameters():
        whole = next((part for part in name.split(".") if part in joined), "")
        names = [name.replace(f".{whole}.", f".{piece}.") for piece in joined[whole]] if whole else [name]
        found[tuple(names)] = checksum(weight)
    return found


def _config_of(policy: PreTrainedModel, dtype: torch.dtype) -> Any:
    """The config of the plain model that vLLM computes."""
    config = copy.deepcopy(policy.config)
    config.dtype = dtype
    config.architectures = config.architectures or [type(policy).__name__]
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def _sender(llm: Any, policy: PreTrainedModel, dtype: torch.dtype) -> Any:
    """vLLM's own sender of weights by CUDA IPC."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    class PolicyWeights(WeightSource):
        @cached_property
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, dtype, tuple(shape)) for name, (shape, _) in plain_weights(policy).items()]

        def iter_full(self) -> Iterator[tuple[str, Tensor]]:
            return ((name, read().to(dtype)) for name, (_, read) in plain_weights(policy).items())

    source = PolicyWeights()
    largest = max(math.prod(one.shape) for one in source.metadata) * dtype.itemsize
    piece = max(largest, PIECE)  # a tensor must fit into one
    info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=piece)
    return WeightTransferTrainerFactory.trainer_init(init_info=info, client=_Client(llm), source=source)


class _Client:
    """The steps of a transfer, as vLLM's sender calls them."""

    def __init__(self, llm: Any):
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)
