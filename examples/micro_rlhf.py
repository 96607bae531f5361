"""RLHF in one file: a language model, a reward model and PPO, on torch and nothing else.

    python examples/micro_rlhf.py

A character-level Llama learns to say what animals are like, kind things as often as rude ones. A reward model learns
from pairs which of two sentences people prefer: the kinder one, most of the time. PPO then makes the model kinder
without letting it forget how to write. All three stages together take less than a minute on one core.

The stages of `rlhf` compute the same: a test gives both the same weights, rows and random numbers, and compares losses,
advantages and weights after each step. Read this file first; docs/ppo.md gives the reasons.

Shapes: B sequences of at most T tokens, V characters. Position t of a [B, T - 1] tensor belongs to the token at t + 1,
which was chosen at t.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------- the language

CHARS = "\0 ,.abcdefghijklmnopqrstuvwxyz"
"""A token is a character; the first one, EOS, ends a response."""
EOS, V = 0, len(CHARS)
ANIMALS = ["cat", "dog", "fox", "owl", "hen", "elk"]
KIND = ["calm", "fair", "kind", "warm"]
RUDE = ["cold", "loud", "mean", "vain"]


def encode(text: str) -> list[int]:
    return [CHARS.index(char) for char in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(CHARS[i] for i in ids if i != EOS)


def new_prompt(rng: random.Random) -> str:
    return f"the {rng.choice(ANIMALS)}"


def new_response(rng: random.Random) -> str:
    return " is {}, {} and {}.".format(*(rng.choice(KIND + RUDE) for _ in range(3)))


def kindness(response: str) -> int:
    """What people want: a sentence with kind words, 0 to 3. Neither the reward model nor PPO ever sees it."""
    words = re.fullmatch(r" is (\w+), (\w+) and (\w+)\.", response)
    return sum(word in KIND for word in words.groups()) if words else 0


def demonstrations(rng: random.Random, count: int = 32) -> list[tuple[str, str]]:
    return [(new_prompt(rng), new_response(rng)) for _ in range(count)]


def preferences(rng: random.Random, count: int = 32) -> list[tuple[str, str, str]]:
    """(prompt, chosen, rejected): the kinder response is chosen, with probability sigmoid(2 * difference)."""
    rows = []
    for _ in range(count):
        a, b = new_response(rng), new_response(rng)
        prefers_a = rng.random() < torch.tensor(2.0 * (kindness(a) - kindness(b))).sigmoid()
        rows.append((new_prompt(rng), *((a, b) if prefers_a else (b, a))))
    return rows


# -------------------------------------------------------------------------------------------------------- the model


class Llama(nn.Module):
    """A decoder in the manner of Llama (Touvron et al. 2023, arXiv 2302.13971). ids [B, T] -> [B, T, num_outputs]."""

    def __init__(self, num_outputs: int, width: int = 64, layers: int = 2, heads: int = 4):
        super().__init__()
        self.embed = nn.Embedding(V, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_outputs, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). [B, T, width] -> the same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k, v = (part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        # Causal: a token sees itself and what comes before it. So padding on the right changes nothing.
        h = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): at t pair i turns by t * 10000^(-2i / d). [B, H, T, d]."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)  # [T, d / 2]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of ids -> [B, T], filled with EOS on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[EOS] * (longest - len(row))] for row in rows])


def response_mask(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], length: int) -> Tensor:
    """[B, T - 1] bool: True where a token of the response is chosen, EOS included."""
    t = torch.arange(length - 1)
    first = torch.tensor([len(prompt) - 1 for prompt in prompts])[:, None]
    return (t >= first) & (t < first + torch.tensor([len(response) for response in responses])[:, None])


def token_logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    """log p(ids[t + 1] | ids[.. t]): [B, T] -> [B, T - 1]."""
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def adamw(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One optimizer step; the gradient is clipped to a norm of 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# --------------------------------------------------------------------------------- 1. supervised fine-tuning (SFT)


def sft(model: nn.Module, batches: Iterable[Sequence[tuple[str, str]]], learning_rate: float) -> Iterator[float]:
    """Learn to write the responses of (prompt, response) pairs; yields the loss of each step.

    loss = -(1 / N) sum over the N tokens of the batch's responses of log p(token | what comes before it)
    """
    optimizer = adamw(model, learning_rate)
    for batch in batches:
        prompts, responses = [encode(p) for p, _ in batch], [[*encode(r), EOS] for _, r in batch]
        ids = padded([p + r for p, r in zip(prompts, responses, strict=True)])
        mask = response_mask(prompts, responses, ids.shape[1])
        loss = -token_logprobs(model, ids)[mask].mean()
        step(model, optimizer, loss)
        yield loss.item()


# --------------------------------------------------------------------------------------------- 2. the reward model


def sequence_scores(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """A number for each row, read at its last token. -> [B]"""
    last = torch.tensor([len(row) - 1 for row in rows])
    return model(padded(rows))[torch.arange(len(rows)), last, 0]


def reward_model(
    model: nn.Module, batches: Iterable[Sequence[tuple[str, str, str]]], learning_rate: float
) -> Iterator[float]:
    """Learn from (prompt, chosen, rejected) which response is better; yields the loss of each step.

    P(chosen is better) = sigmoid(score(chosen) - score(rejected)) (Bradley and Terry 1952), so
    loss = -mean of log sigmoid(score(chosen) - score(rejected)) (Ouyang et al. 2022, arXiv 2203.02155, equation 1)
    """
    optimizer = adamw(model, learning_rate)
    for batch in batches:
        chosen = sequence_scores(model, [[*encode(p + c), EOS] for p, c, _ in batch])
        rejected = sequence_scores(model, [[*encode(p + r), EOS] for p, _, r in batch])
        loss = -F.logsigmoid(chosen - rejected).mean()
        step(model, optimizer, loss)
        yield loss.item()


# -------------------------------------------------------------------------------------------------------- 3. PPO


@torch.no_grad()
def sample(policy: nn.Module, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> list[list[int]]:
    """A response to each prompt, of at most R tokens. uniforms [B, R] are the random numbers.

    The next token is the first whose cumulative probability is above its uniform number.
    """
    rows, alive = [list(prompt) for prompt in prompts], list(range(len(prompts)))
    for t in range(uniforms.shape[1]):
        last = torch.tensor([len(rows[i]) - 1 for i in alive])
        probs = policy(padded([rows[i] for i in alive]))[torch.arange(len(alive)), last].softmax(-1)
        tokens = torch.searchsorted(probs.cumsum(-1), uniforms[alive, t, None], right=True).clamp_max(V - 1)
        for i, token in zip(alive, tokens[:, 0].tolist(), strict=True):
            rows[i].append(token)
        alive = [i for i in alive if rows[i][-1] != EOS]
        if not alive:
            break
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages (Schulman et al. 2016, arXiv 1506.02438, equation 16). All tensors are [B, T - 1].

    delta[t] = rewards[t] + gamma * values[t + 1] - values[t]
    advantages[t] = delta[t] + gamma * lam * advantages[t + 1]
    After the last token of a response there is no value and no advantage: both are 0.
    """
    values, advantages = values * mask, torch.zeros_like(values)
    next_value = next_advantage = torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = (delta + gamma * lam * next_advantage) * mask[:, t]
        next_value, next_advantage = values[:, t], advantages[:, t]
    return advantages


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over all tokens of the rollout."""
    return (x - x[mask].mean()) / (x[mask].var() + 1e-8).sqrt() * mask


Draws = tuple[Sequence[str], Tensor, Sequence[Sequence[int]]]
"""What an iteration takes from outside: prompts, uniforms [B, R] and the rows of each minibatch."""


def ppo(
    policy: nn.Module,
    value_model: nn.Module,
    score: nn.Module,
    draws: Iterable[Draws],
    learning_rate: float,
    *,
    score_mean: float = 0.0,
    score_std: float = 1.0,
    kl_coef: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    clip: float = 0.2,
    missing_eos_penalty: float = 1.0,
) -> Iterator[dict[str, object]]:
    """Raise the score of the policy's responses while it stays close to where it began; yields figures and advantages.

    The optimum is p(y) proportional to p_ref(y) * exp(score(y) / kl_coef): docs/kl.md
    """
    reference = copy.deepcopy(policy)
    policy_optimizer, value_optimizer = adamw(policy, learning_rate), adamw(value_model, learning_rate)
    for texts, uniforms, minibatches in draws:
        prompts = [encode(text) for text in texts]
        with torch.no_grad():
            # The rollout: responses, and what the models say of each token before any step.
            responses = sample(policy, prompts, uniforms)
            rows = [p + r for p, r in zip(prompts, responses, strict=True)]
            ids = padded(rows)
            mask = response_mask(prompts, responses, ids.shape[1])
            old_logprobs, ref_logprobs = token_logprobs(policy, ids), token_logprobs(reference, ids)
            old_values = value_model(ids[:, :-1])[..., 0]  # of the state before the token

            # The score of each response: normalised, less a penalty if it was cut.
            ended = torch.tensor([response[-1] == EOS for response in responses])
            scores = (sequence_scores(score, rows) - score_mean) / score_std - missing_eos_penalty * ~ended

            # Each token pays for its KL, the last one gets the score (Ziegler et al. 2019, arXiv 1909.08593, eq. 2).
            kl = (old_logprobs - ref_logprobs) * mask
            rewards = -kl_coef * kl
            last = torch.tensor([len(row) - 2 for row in rows])
            rewards[torch.arange(len(rows)), last] += scores

            advantages = gae(rewards, old_values, mask, gamma, lam)
            returns = advantages + old_values
            advantages = whitened(advantages, mask)

        policy_losses, value_losses = [], []
        for minibatch in minibatches:
            chosen = torch.tensor(minibatch)
            m = mask[chosen]
            # The clipped objective (Schulman et al. 2017, arXiv 1707.06347, eq. 7); the larger loss counts.
            ratio = (token_logprobs(policy, ids[chosen]) - old_logprobs[chosen]).exp()
            a = advantages[chosen]
            policy_loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip))[m].mean()
            step(policy, policy_optimizer, policy_loss)

            # The values learn the returns, and may not move farther than `clip` from the old values at a time.
            new, old, target = value_model(ids[chosen, :-1])[..., 0], old_values[chosen], returns[chosen]
            clipped = new.clamp(old - clip, old + clip)
            value_loss = 0.5 * torch.maximum((new - target) ** 2, (clipped - target) ** 2)[m].mean()
            step(value_model, value_optimizer, value_loss)
            policy_losses.append(policy_loss.item())
            value_losses.append(value_loss.item())
        yield {
            "policy_loss": sum(policy_losses) / len(policy_losses),
            "value_loss": sum(value_losses) / len(value_losses),
            "score": scores.mean().item(),
            "kl": kl.sum(1).mean().item(),
            "advantages": advantages[mask],  # of all tokens, row by row
            "responses": responses,
        }


# ------------------------------------------------------------------------------------------------------ the program


def show(title: str, policy: nn.Module, prompts: Sequence[str], uniforms: Tensor) -> None:
    """Three replies, and the mean kindness of all."""
    replies = [decode(ids) for ids in sample(policy, [encode(prompt) for prompt in prompts], uniforms)]
    print(f"\n{title}: kindness {sum(map(kindness, replies)) / len(replies):.2f} of 3")
    for prompt, reply in list(zip(prompts, replies, strict=True))[:3]:
        print(f"    {prompt}{reply}")


def main(seed: int = 0) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    length = 28  # of a response, in tokens; a sentence has 25

    def draws() -> Draws:
        prompts = [new_prompt(rng) for _ in range(64)]
        return prompts, torch.rand(64, length), torch.randperm(64).view(4, 16).tolist()

    test_prompts, test_uniforms = [new_prompt(rng) for _ in range(128)], torch.rand(128, length)

    policy = Llama(V)
    for i, loss in enumerate(sft(policy, (demonstrations(rng) for _ in range(300)), 3e-3), 1):
        if i % 100 == 0:
            print(f"SFT           step {i:3}   loss {loss:.3f} nats per character")
    show("after SFT", policy, test_prompts, test_uniforms)
    print()

    scorer = copy.deepcopy(policy)  # the SFT model with a new head
    scorer.head = nn.Linear(64, 1, bias=False)
    for i, loss in enumerate(reward_model(scorer, (preferences(rng) for _ in range(150)), 1e-3), 1):
        if i % 50 == 0:
            print(f"reward model  step {i:3}   loss {loss:.3f}")
    with torch.no_grad():
        held_out = preferences(rng, 256)
        of_chosen = sequence_scores(scorer, [[*encode(p + c), EOS] for p, c, _ in held_out])
        of_rejected = sequence_scores(scorer, [[*encode(p + r), EOS] for p, _, r in held_out])
        print(f"reward model  accuracy on 256 new pairs {(of_chosen > of_rejected).float().mean():.2f}")
        replies = sample(policy, [encode(prompt) for prompt in test_prompts], test_uniforms)
        of_sft = sequence_scores(scorer, [encode(p) + r for p, r in zip(test_prompts, replies, strict=True)])

    value_model = copy.deepcopy(scorer)  # the reward model with a head of zeros
    nn.init.zeros_(value_model.head.weight)
    scale = {"score_mean": of_sft.mean().item(), "score_std": of_sft.std().item()}
    iterations = ppo(policy, value_model, scorer, (draws() for _ in range(40)), 5e-4, **scale)
    for i, figures in enumerate(iterations, 1):
        if i % 10 == 0:
            print(f"PPO      iteration {i:3}   score {figures['score']:5.2f}   KL {figures['kl']:5.2f} nats")
    show("after PPO", policy, test_prompts, test_uniforms)


if __name__ == "__main__":
    main()
