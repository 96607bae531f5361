"""A task with few enough responses to list them all, and the optimal policy of each algorithm on it.

Notation: a *state* s is a prompt with the tokens generated so far. pi(a|s) is the probability of token a in state s.
pi(y|x) is the product of these along a response y. r(x, y) is its score, ref the reference policy, beta the
coefficient of the KL. Q(s, a) is the expected score after token a, V(s) the expected score in state s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EOS = 0


@dataclass(frozen=True)
class Task:
    """P prompts and all B possible responses to them, of at most R tokens; EOS is token 0 of V."""

    responses: list[tuple[int, ...]]
    """[B] the tokens of each response. It ends with EOS or is cut after R tokens."""
    states: list[tuple[int, ...]]  # [S] the number of the prompt, followed by the tokens generated so far
    prompt: Tensor  # [B] the number of each response's prompt
    token: Tensor  # [B, R], 0 under padding
    state: Tensor  # [B, R] the state in which each token was chosen, 0 under padding
    mask: Tensor  # [B, R] bool, True on real tokens, EOS included
    score: Tensor  # [B] r(x, y)
    ref_logits: Tensor  # [S, V]

    @property
    def num_prompts(self) -> int:
        return int(self.prompt[-1]) + 1


def make_task(seed: int, *, vocab_size: int, longest: int, num_prompts: int) -> Task:
    """A task with random scores and a random reference policy."""
    draws = itertools.product(range(vocab_size), repeat=longest)
    responses = list(dict.fromkeys(_until_eos(draw) for draw in draws))
    pairs = [(x, y) for x in range(num_prompts) for y in responses]
    states = list(dict.fromkeys((x, *y[:t]) for x, y in pairs for t in range(len(y))))
    number = {state: i for i, state in enumerate(states)}

    token, state = torch.zeros(2, len(pairs), longest, dtype=torch.int64)
    for b, (x, y) in enumerate(pairs):
        token[b, : len(y)] = torch.tensor(y)
        state[b, : len(y)] = torch.tensor([number[x, *y[:t]] for t in range(len(y))])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    generator = torch.Generator().manual_seed(seed)
    prompt = torch.tensor([x for x, _ in pairs])
    return Task(
        responses=[y for _, y in pairs],
        states=states,
        prompt=prompt,
        token=token,
        state=state,
        mask=torch.tensor([[t < len(y) for t in range(longest)] for _, y in pairs]),
        score=(0.5 * normal(len(pairs))).clamp(-1.5, 1.5) + 0.3 * normal(num_prompts)[prompt],
        ref_logits=0.7 * normal(len(states), vocab_size),
    )


def _until_eos(draw: tuple[int, ...]) -> tuple[int, ...]:
    return draw[: draw.index(EOS) + 1] if EOS in draw else draw


# ---------------------------------------------------------------------------------------------- measures


def chances(task: Task, logits: Tensor) -> Tensor:
    """pi(y|x) [B] of the policy with these logits [S, V]. The probabilities of a prompt's responses sum to 1."""
    logprobs = logits.log_softmax(-1)[task.state, task.token]
    return torch.where(task.mask, logprobs, 0).sum(1).exp()


def mean_of_prompt(task: Task, values: Tensor, chance: Tensor) -> Tensor:
    """E[value | x] over the responses to a prompt, repeated for each response: [B]."""
    means = torch.zeros(task.num_prompts, dtype=values.dtype).index_add(0, task.prompt, chance * values)
    return means[task.prompt]


def total_variation(task: Task, p: Tensor, q: Tensor) -> float:
    """Mean over prompts of sum_y |p(y|x) - q(y|x)| / 2: 0 for equal policies, 1 for disjoint ones."""
    return ((p - q).abs().sum() / 2 / task.num_prompts).item()


# ---------------------------------------------------------------------------------------------- the optima


Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of n states: Q(s, .) [n, V] and ref(.|s) [n, V] -> the policy pi(.|s) [n, V] and V(s) [n]."""


def kl_regularised(task: Task, kl_coef: float) -> Tensor:
    """pi*(y|x) = ref(y|x) * exp(r / beta) / Z(x), the only maximum of E[r] - beta * KL(pi, ref).

    At pi*, r - beta * log(pi / ref) = beta * log Z(x) is the same for every y. With the KL in the reward, all
    advantages are 0 there. So a baseline, whitening, a division by the standard deviation, a weight per response or a
    clip does not move the optimum.
    """
    weight = chances(task, task.ref_logits) * torch.exp(task.score / kl_coef)
    return weight / mean_of_prompt(task, torch.ones_like(weight), weight)


def backwards(task: Task, rule: Rule) -> Tensor:
    """pi(y|x) [B] of the policy that applies `rule` in every state, computed from the last token back to the first."""
    score = task.score
    ref = task.ref_logits.softmax(-1)
    q, policy = torch.zeros_like(ref), torch.ones_like(ref)
    value = torch.zeros_like(ref[:, 0])
    longest = task.mask.shape[1]
    for t in reversed(range(longest)):
        rows = task.mask[:, t]
        s, a = task.state[rows, t], task.token[rows, t]
        if t + 1 < longest:
            q[s, a] = torch.where(task.mask[rows, t + 1], value[task.state[rows, t + 1]], score[rows])
        else:
            q[s, a] = score[rows]
        here = s.unique()
        policy[here], value[here] = rule(q[here], ref[here])
    return chances(task, policy.log())


def soft_rule(kl_coef: float) -> Rule:
    """pi* token by token: V(s) = beta * log sum_a ref * exp(Q / beta) includes the KL of later tokens."""

    def rule(q: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        value = kl_coef * torch.logsumexp(ref.log() + q / kl_coef, -1)
        return ref * torch.exp((q - value[:, None]) / kl_coef), value

    return rule


def token_kl_rule(kl_coef: float) -> Rule:
    """The KL of each state as a loss, estimated by k2 or exact: pi ~ ref * exp(Q / beta), V(s) = sum_a pi * Q.

    The gradient of this loss treats the visited states as given. So no token pays for the KL of the states that it
    leads to, V is a plain mean, and for responses of two or more tokens the optimum differs from pi*.
    """

    def rule(q: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        policy = torch.softmax(ref.log() + q / kl_coef, -1)
        return policy, (policy * q).sum(-1)

    return rule


def token_k3_rule(kl_coef: float) -> Rule:
    """k3 as a loss: pi = beta * ref / (lambda - Q), V(s) = sum_a pi * Q.

    E_pi[grad k3] = E_pi[(1 - ref / pi) * grad log pi] is the gradient of KL(ref, pi), not of KL(pi, ref). At the
    optimum, Q + beta * ref / pi = lambda for all tokens, and lambda makes the probabilities sum to 1. The sum falls as
    lambda grows. It is at least 1 at max(Q + beta * ref), where one term alone is 1, and at most 1 at max(Q) + beta.
    Bisection finds lambda in between.
    """

    def rule(q: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        low, high = (q + kl_coef * ref).amax(-1, keepdim=True), q.amax(-1, keepdim=True) + kl_coef
        for _ in range(50):
            middle = (low + high) / 2
            too_low = (kl_coef * ref / (middle - q)).sum(-1, keepdim=True) > 1
            low, high = torch.where(too_low, middle, low), torch.where(too_low, high, middle)
        policy = kl_coef * ref / (high - q)
        return policy, (policy * q).sum(-1)

    return rule


def entropy_rule(kl_coef: float, entropy_coef: float) -> Rule:
    """The KL in the reward and an entropy bonus c in the loss: pi ~ exp((Q + beta * log ref) / (beta + c)).

    V(s) = sum_a pi * (Q - beta * log(pi / ref)) includes the KL of later tokens, but not their entropy.
    """

    def rule(q: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        policy = torch.softmax((q + kl_coef * ref.log()) / (kl_coef + entropy_coef), -1)
        return policy, (policy * (q - kl_coef * torch.log(policy / ref))).sum(-1)

    return rule
