"""Another program that samples from a copy of the policy's weights, and the check after every transfer of weights.

An engine may report the new version while some of its tensors are old: a tied head that is loaded only once, a block
that a mapping of names missed. Nothing fails then. The policy is trained on the responses of another one. So the
engine's word counts for nothing. After every transfer it samples a few responses, and training scores their tokens.
The run stops if the log-probabilities differ by more than rounding, and names the tensors that differ.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.errors import ConfigError, RunError
from rlhf_cli.health.history import GAP_TOLERANCE
from rlhf_cli.models.forward import compute_dtype
from rlhf_cli.models.save import plain_weights
from rlhf_cli.processes.distributed import World
from rlhf_cli.program import install_extra
from rlhf_cli.rollout.distribution import Response, Sampling
from rlhf_cli.rollout.sampling import draw_uniforms
from rlhf_cli.rollout.scoring import response_logprobs

PROBE_PROMPTS = 16
PROBE_TOKENS = 32
NAMED = 4
"""Tensors that a message names."""
CHUNK = 2**24
"""Numbers whose products with their positions are held at a time: 128 MB."""


@dataclass(frozen=True)
class Checksum:
    """The bit patterns of a tensor as two sums, modulo 2**64."""

    count: int
    """Numbers in the tensor."""
    total: int
    """Sum of the bit patterns."""
    weighted: int
    """Sum of each bit pattern times its position."""

    def followed_by(self, other: Checksum) -> Checksum:
        """The checksum of a tensor whose rows are those of this one and then those of the other."""
        moved = other.weighted + self.count * other.total
        return Checksum(self.count + other.count, (self.total + other.total) % 2**64, (self.weighted + moved) % 2**64)

    def same_numbers(self, other: Checksum) -> bool:
        """Whether both tensors hold the same numbers. Zeros behind the numbers of one of them do not count."""
        return (self.total, self.weighted) == (other.total, other.weighted)


@torch.no_grad()
def checksum(tensor: Tensor) -> Checksum:
    """The checksum of a float tensor of 2 or 4 bytes per number.

    >>> one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    >>> checksum(one).followed_by(checksum(two)) == checksum(torch.tensor([1.0, 2.0, 3.0]))
    True
    >>> checksum(one).same_numbers(checksum(one.flip(0)))
    False
    """
    bits = _bits(tensor.detach().contiguous()).flatten()
    total = weighted = 0
    for first in range(0, len(bits), CHUNK):
        chunk = bits[first : first + CHUNK].long()
        total += int(chunk.sum())
        weighted += int((chunk * torch.arange(first, first + len(chunk), device=bits.device)).sum())
    return Checksum(len(bits), total % 2**64, weighted % 2**64)


class Engine(Protocol):
    """A program that samples from a copy of the policy's weights."""

    name: str
    """As in `rollout.engine`."""
    dtype: torch.dtype
    """The type of its weights."""

    def wake(self) -> bool:
        """Make ready to sample; returns whether it still holds the weights of the last `load`."""

    def load(self, policy: PreTrainedModel) -> None:
        """Take over the weights of the policy, as `plain_weights` gives them."""

    def sample(self, prompts: Sequence[Sequence[int]], uniforms: Tensor, sampling: Sampling) -> list[Response]:
        """One response to each prompt, with the log-probabilities of the distribution that it was drawn from.

        uniforms [B, R]: each row fixes the draws of its response; R is the maximum length.
        """

    def checksums(self) -> Mapping[tuple[str, ...], Checksum]:
        """The checksum of each tensor, by the names of the weights that lie in it one after the other.

        Names are those of transformers. Empty if the engine's weights cannot be read.
        """

    def sleep(self) -> None:
        """Give back what memory it can until the next `wake`."""


class SyncedEngine:
    """An engine whose weights follow the policy, and which is probed after every transfer."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[PromptRow],
        *,
        max_new_tokens: int,
        precision: str,
        tolerance: float,
        max_staleness: int = 0,
    ):
        """prompts: those of the probe. precision: of training's forward passes. tolerance: nats, of the mean gap.

        max_staleness: updates of the policy that the engine's weights may lack.
        """
        self.engine, self.prompts, self.precision, self.tolerance = engine, list(prompts), precision, tolerance
        self.probe_tokens, self.max_staleness = min(PROBE_TOKENS, max_new_tokens), max_staleness
        self.gap = math.nan
        """Nats: the mean gap of the last probe."""
        self._staleness: float = math.inf
        self._fingerprint: list[int] = []
        self._trusted: set[tuple[str, ...]] = set()
        """Tensors that were once equal to the policy's, so their checksums can be compared."""

    def sample(
        self, policy: PreTrainedModel, prompts: Sequence[Sequence[int]], uniforms: Tensor, sampling: Sampling
    ) -> list[Response]:
        """One response to each prompt, from weights that lack at most `max_staleness` updates of the policy.

        Raises RunError if the engine does not hold the weights after a transfer.
        """
        fingerprint = _fingerprint(policy)
        if fingerprint != self._fingerprint:
            self._fingerprint, self._staleness = fingerprint, self._staleness + 1
        if not self.engine.wake() or self._staleness > self.max_staleness:
            self._transfer(policy)
        responses = self.engine.sample(prompts, uniforms, sampling)
        self.engine.sleep()
        return responses

    def require_current(self) -> None:
        """Have the next call of `sample` use the policy as it is, whatever `max_staleness` is."""
        self._staleness = math.inf

    def _transfer(self, policy: PreTrainedModel) -> None:
        """Send the weights and probe them."""
        self.engine.load(policy)
        self._staleness = 0
        self.gap = self._gap(policy)
        held = self.engine.checksums()
        different = different_tensors(policy, held, self.engine.dtype)
        self._trusted |= held.keys() - set(different)
        lost = [names for names in different if names in self._trusted]
        if self.gap <= self.tolerance and not lost:
            return
        raise RunError(
            f"rollout.engine: {self.engine.name} does not hold the weights of the policy after they were sent. On "
            f"average its log-probabilities differ from training's by {self.gap:.3g} nats per token (at most "
            f"{self.tolerance:g}). {_cause(policy, held, lost or different)}. Set rollout.engine: own, or install "
            f"another version of {self.engine.name}"
        )

    @torch.no_grad()
    def _gap(self, policy: PreTrainedModel) -> float:
        """The mean |difference| of the log-probabilities of some sampled tokens between engine and training."""
        sampling = Sampling()
        uniforms = draw_uniforms(0, "engine probe", 0, len(self.prompts), self.probe_tokens)
        responses = self.engine.sample([prompt.ids for prompt in self.prompts], uniforms, sampling)
        trained = response_logprobs(policy, self.prompts, responses, sampling, self.precision)
        sampled = trained.new_tensor([logprob for response in responses for logprob in response.logprobs])
        return (trained - sampled).abs().mean().item()


def _fingerprint(policy: PreTrainedModel) -> list[int]:
    """The sum of the bit patterns of each trained weight.

    Not torch's count of writes (`Tensor._version`): the fused AdamW does not count.
    """
    trained = [parameter.detach() for parameter in policy.parameters() if parameter.requires_grad]
    sums = [_bits(parameter).sum(dtype=torch.int64) for parameter in trained]
    return torch.stack(sums).tolist() if sums else []


def _bits(tensor: Tensor) -> Tensor:
    """The bit patterns of a float tensor of 2 or 4 bytes per number, as integers."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def different_tensors(
    policy: PreTrainedModel, held: Mapping[tuple[str, ...], Checksum], dtype: torch.dtype
) -> list[tuple[str, ...]]:
    """The tensors of an engine that differ from the policy's weights: the head, the embedding, then the others.

    A tensor with a name that the policy does not have is skipped.
    """
    if not held:
        return []
    expected = {name: checksum(read().to(dtype)) for name, (_, read) in plain_weights(policy).items()}
    head, embedding = _names_of_embeddings(policy)
    if head not in expected and embedding in expected:  # tied
        expected[head] = expected[embedding]
    different = []
    for names, found in held.items():
        if not all(name in expected for name in names):
            continue
        first, *others = (expected[name] for name in names)
        for other in others:
            first = first.followed_by(other)
        if not first.same_numbers(found):
            different.append(names)
    return sorted(different, key=lambda names: (head not in names, embedding not in names))


def _names_of_embeddings(policy: PreTrainedModel) -> tuple[str, str]:
    """The names of the weights of the head and of the embedding."""
    modules = policy.get_output_embeddings(), policy.get_input_embeddings()
    names = {id(module): name for name, module in policy.named_modules()}
    head, embedding = (f"{names[id(module)]}.weight" for module in modules)
    return head, embedding


def _cause(
    policy: PreTrainedModel, held: Mapping[tuple[str, ...], Checksum], different: Sequence[tuple[str, ...]]
) -> str:
    """What a probe that failed found among the tensors."""
    if not held:
        return "Its weights cannot be read, so the tensors that differ are not known"
    if not different:
        return "The tensors that can be compared are equal, so it computes with other token ids, positions or precision"
    head, embedding = _names_of_embeddings(policy)
    is_tied = policy.get_output_embeddings().weight is policy.get_input_embeddings().weight
    labels = [" + ".join(names) for names in different]
    if is_tied and labels[0] == head:
        labels[0] += f" (tied to {embedding})"
    more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
    return f"These tensors differ: {', '.join(labels[:NAMED])}{more}"


# ---------------------------------------------------------------------- the rollout engine of a run (`rollout.engine`)


def require_engine(config: PPOConfig, world: World) -> None:
    """Raise ConfigError if the engine of the config cannot run here, before any model is loaded."""
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"rollout.engine: vllm is not installed. Run: {install_extra('vllm', 'vllm')}")
    problem = "needs a GPU, and there is none" if world.device.type != "cuda" else ""
    if world.size > 1:
        problem = f"runs with one process so far, and this run has {world.size}"
    if problem:
        raise ConfigError(f"rollout.engine: {config.rollout.engine} {problem}. Set it to own")


def load_engine(
    config: PPOConfig, world: World, policy: PreTrainedModel, prompts: Sequence[PromptRow], longest: int
) -> SyncedEngine:
    """The engine that samples for this policy.

    prompts: the training prompts; the probe uses the first of them. longest: tokens of the longest text. Raises
    ConfigError for an encoder-decoder.
    """
    rollout = config.rollout
    if policy.config.is_encoder_decoder:
        raise ConfigError(
            f"rollout.engine: {rollout.engine} samples from causal models only, and {type(policy).__name__} is an "
            "encoder-decoder. Set it to own"
        )
    dtype = compute_dtype(world.device, config.precision)
    return SyncedEngine(
        new_engine(config, policy, dtype, longest),
        [prompts[i] for i in range(min(PROBE_PROMPTS, len(prompts)))],
        max_new_tokens=rollout.max_new_tokens,
        precision=config.precision,
        tolerance=GAP_TOLERANCE["float32" if dtype == torch.float32 else "bfloat16"],
        max_staleness=rollout.max_staleness,
    )


def new_engine(config: PPOConfig, policy: PreTrainedModel, dtype: torch.dtype, longest: int) -> Engine:
    """The engine that the config names, for weights of this type."""
    from rlhf_cli.rollout.vllm_engine import VllmEngine

    rollout = config.rollout
    return VllmEngine(
        policy,
        dtype=dtype,
        longest=longest,
        memory=rollout.engine_memory,
        keeps_weights=rollout.max_staleness > 0,
    )
