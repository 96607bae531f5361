"""Write the tables of benchmarks/SCALE.md about 8 to 1,024 GPUs, and hold them against figures of others.

    python benchmarks/scale.py          # rewrites the end of benchmarks/SCALE.md, seconds

Memory comes from `rlhf plan`'s own functions. Communication is counted from the sizes of the models, as the text above
the tables says.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import LlamaConfig

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.plan.memory import Machine
from rlhf_cli.plan.origins import ModelOrigins
from rlhf_cli.plan.shapes import Shape
from rlhf_cli.plan.stages import StagePlan, plan_stage

Shard = bool | Literal["hybrid"]
PAGE = Path(__file__).with_name("SCALE.md")
MARK = "<!-- Written by benchmarks/scale.py from here on; do not edit by hand. -->\n"
GPUS = (8, 64, 1024)
MACHINE = 8
"""GPUs of a machine."""
TOKENS = 8192
"""Tokens of a GPU in a step: one sequence of SFT, eight prompts of PPO with their responses."""
ROWS, PROMPT, RESPONSE = 8, 512, 512
"""Responses of a GPU in a PPO iteration, and the tokens of a prompt and of a response."""
SIZES = {
    # Llama 2 7B, and Llama 3.1 8B and 70B.
    "7 B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 32, "vocab_size": 32000},
    "8 B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128256},
    "70 B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "vocab_size": 128256},
}
SHARE_OF_PEAK = 0.4
FLOPS = {"H100": 989e12 * SHARE_OF_PEAK, "A800": 312e12 * SHARE_OF_PEAK}
"""Operations a second in bfloat16."""
MEMORY = {"H100": 3.35e12, "A800": 2.0e12}
"""Bytes a second that a GPU reads from its own memory."""
NVLINK = {"H100": 400e9, "A800": 160e9}
"""Bytes a second that a GPU sends to the next one of its machine in a collective operation."""
LINK = 40e9
"""Bytes a second of a network link of 400 Gbit/s."""


@dataclass(frozen=True)
class Sent:
    """Bytes that collective operations send: a GPU to the next one of its machine, and a machine to the next one."""

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.inside + other.inside, self.between + other.between)

    def __rmul__(self, times: float) -> "Sent":
        return Sent(times * self.inside, times * self.between)

    def __str__(self) -> str:
        return f"{self.inside / 1e9:,.0f} / {self.between / 1e9:,.0f}"

    def seconds(self, links: int = MACHINE, gpu: str = "H100") -> float:
        """Seconds of sending with this number of links a machine. Both ways are in use at the same time."""
        return max(self.inside / NVLINK[gpu], self.between / (links * LINK))


class PPOModels(NamedTuple):
    """The models of PPO."""

    policy: Shape
    value: Shape
    reference: Shape
    reward: Shape


class Iteration(NamedTuple):
    """What the phases of a PPO iteration send."""

    rollout: Sent
    scoring: Sent
    update: Sent

    @property
    def total(self) -> Sent:
        return self.rollout + self.scoring + self.update


def main() -> None:
    """Rewrite the tables."""
    text = PAGE.read_text(encoding="utf-8").split(MARK)[0] + MARK + render()
    PAGE.write_text(text, encoding="utf-8")
    print(render())


def render() -> str:
    """The tables in Markdown, each with a line that is computed step by step."""
    tables = [
        ("SFT", sft_by_hand(), SFT_COLUMNS, [sft_row(*case) for case in sft_cases()]),
        ("PPO", ppo_by_hand(), PPO_COLUMNS, [ppo_row(*case) for case in ppo_cases()]),
        ("Figures of others", "", "figure, measured by others, on paper", held_against()),
    ]
    lines = []
    for title, by_hand, columns, rows in tables:
        names = columns.split(", ")
        lines += ["", f"### {title}", "", *([by_hand, ""] if by_hand else [])]
        lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------- tables

SFT_COLUMNS = "model, GPUs, `shard`, GB a GPU, sent in a step: GB, computing: s, sending: s, with one link"
PPO_COLUMNS = (
    "model, GPUs, `shard`, sampled from, GB a GPU, rollout: GB, scoring: GB, update: GB, sampling: s, passes: s, "
    "sending: s, with one link"
)


def sft_cases() -> list[tuple[str, int, Shard]]:
    """The rows of the table about SFT. Inside one machine there is nothing hybrid."""
    return [
        (name, gpus, shard)
        for name in SIZES
        for gpus in GPUS
        for shard in (True, "hybrid")
        if shard is True or gpus > 8
    ]


def sft_row(name: str, gpus: int, shard: Shard) -> list[str]:
    """A row of the table about SFT."""
    plan = planned(name, gpus, shard=shard)
    shape = plan.models[0].shape
    sent = sent_in_step(shape, gpus, shard)
    seconds = (computing(shape), sent.seconds(), sent.seconds(links=1))
    memory = f"{plan.peak.total / 1e9:.0f}"
    return [name, f"{gpus:,}", named(shard), memory, str(sent), *map(short, seconds)]


def ppo_cases() -> list[tuple[str, int, Shard, bool]]:
    """The rows of the table about PPO. No GPU holds a whole copy of 70 B to sample from."""
    ways: dict[str, list[tuple[Shard, bool]]] = {
        "7 B": [(True, True), ("hybrid", True), (True, False), ("hybrid", False)],
        "70 B": [(True, False)],
    }
    return [
        (name, gpus, shard, copies)
        for name in ways
        for gpus in GPUS
        for shard, copies in ways[name]
        if shard is True or gpus > MACHINE
    ]


def ppo_row(name: str, gpus: int, shard: Shard, copies: bool) -> list[str]:
    """A row of the table about PPO. With `copies` each process samples from a copy of the policy."""
    plan = planned_ppo(name, gpus, shard, copies=copies)
    models = models_of(plan)
    sent = sent_in_iteration(models, gpus, shard, copies=copies)
    read, passes = sampling_s(models.policy, "H100", ROWS, PROMPT, RESPONSE), ppo_passes_s(models)
    seconds = (read, passes, sent.total.seconds(), sent.total.seconds(links=1))
    source = "a copy" if copies else "the shards"
    memory = f"{plan.peak.total / 1e9:.0f}"
    return [name, f"{gpus:,}", named(shard), source, memory, *map(str, sent), *map(short, seconds)]


def named(shard: Shard) -> str:
    """`distributed.shard` as in a config."""
    return "hybrid" if shard == "hybrid" else "true"


def short(seconds: float) -> str:
    """Seconds with two digits or more."""
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"


def sft_by_hand() -> str:
    """The SFT row of 7 B on 64 GPUs, step by step."""
    shape = planned("7 B", 64).models[0].shape
    blocks, ends, weights = shape.layer * shape.layers / 1e9, shape.ends / 1e9, shape.weights / 1e9
    once, gradients = gathered_bytes(shape) / 1e9, 4 * weights
    sent = sent_in_step(shape, 64)
    hybrid = sent_in_step(shape, 64, "hybrid")
    return (
        f"7 B on 64 GPUs by hand: {blocks:.2f} billion weights of blocks and {ends:.2f} of the rest are gathered as\n"
        f"2 x {blocks:.2f} + 4 x {ends:.2f} = {once:.1f} GB, the gradients are 4 x {weights:.2f} = {gradients:.1f} GB. "
        f"So `true` sends\n(2 x {once:.1f} + {gradients:.1f}) x 63/64 = {sent.inside / 1e9:.0f} GB, in "
        f"{sent.between / 1e9:.0f} / (8 x 40) = {sent.seconds():.1f} s. `hybrid` sends\n"
        f"(2 x {once:.1f} + {gradients:.1f}) x 7/8 = {hybrid.inside / 1e9:.0f} GB inside, and between 8 machines "
        f"2 x 7/8 x {gradients:.1f} = {hybrid.between / 1e9:.0f} GB.\n"
        f"Computing: 8 x {weights:.2f} x 10^9 x 8,192 / (0.4 x 989 x 10^12) = {computing(shape):.1f} s."
    )


def ppo_by_hand() -> str:
    """The PPO row of 7 B on 64 GPUs with copies, step by step."""
    models = models_of(planned_ppo("7 B", 64, True, copies=True))
    policy, scorer = models.policy, models.reward
    sent = sent_in_iteration(models, 64, True, copies=True)
    once, other = gathered_bytes(policy) / 1e9, gathered_bytes(scorer) / 1e9
    gradients, of_value = 4 * policy.weights / 1e9, 4 * models.value.weights / 1e9
    read, cache = 2 * policy.weights / 1e9, ROWS * (PROMPT + RESPONSE / 2) * 2 * policy.cache / 1e9
    return (
        f"7 B on 64 GPUs with a copy by hand: the copy is read from float32 rows, 4 x {policy.weights / 1e9:.2f} = "
        f"{gradients:.1f} GB. The scoring\npasses gather 2 x {once:.1f} (policy, reference) + 2 x {other:.1f} "
        f"(value, reward) GB, the update (2 x {once:.1f} + {gradients:.1f}) + (2 x {other:.1f} + {of_value:.1f}) GB.\n"
        f"Times 63/64 that is {sent.rollout.inside / 1e9:.0f}, {sent.scoring.inside / 1e9:.0f} and "
        f"{sent.update.inside / 1e9:.0f} GB. A token reads {read:.1f} GB of weights and {cache:.1f} GB of keys and "
        f"values, so\n512 take 512 x {read + cache:.1f} / 3,350 = "
        f"{sampling_s(policy, 'H100', ROWS, PROMPT, RESPONSE):.1f} s. From the shards each token gathers {once:.1f} GB."
    )


def held_against() -> list[tuple[str, str, str]]:
    """(what, the figure of others, what the same assumptions give for it)."""
    sft = planned("8 B", 8)
    eight = sft.models[0].shape
    speeds = [[speed_of_sft(eight, gpus, links) for gpus in (8, 128)] for links in (MACHINE, 1)]
    kept = planned("8 B", 8, gradient_checkpointing=False)
    rows = [
        (
            "SFT of Llama 3.1 8B, 8 H100, FSDP2 in bfloat16: tokens/s on each GPU (torchtitan)",
            "5,762",
            f"{speeds[0][0]:,.0f}",
        ),
        (
            "the share of this speed on 128 GPUs",
            "97 %",
            "{:.0%}, with one link {:.0%}".format(*(many / one for one, many in speeds)).replace("%", " %"),
        ),
        (
            "its memory on each of 8 GPUs, GB",
            f"{82 * 1.0737:.0f}",
            f"{sft.peak.total / 1e9:.0f} with recomputed layers, {kept.peak.total / 1e9:.0f} without",
        ),
    ]
    small = {"tokens": 2 * 2048, "shard": False}
    for name, lora, gib in (("LoRA", {"r": 8}, 16.2), ("QLoRA", {"r": 8, "quantize": "nf4"}, 7.4)):
        peak = planned("8 B", 1, lora=lora, **small).peak.total
        what = f"{name} of 8 B, one RTX 4090, 2 x 2,048 tokens: GB (torchtune)"
        rows.append((what, f"{gib * 1.0737:.1f}", f"{peak / 1e9:.1f}"))
    seven, seventy = (planned(name, 8).models[0].shape for name in ("7 B", "70 B"))
    grpo = {"trained_models": 1, "passes": 2}
    ppo = {"trained_models": 2, "passes": 4}
    rows += [
        (
            "RL step of 8 B without a critic, 16 H100, 2,048 responses of 1,019 tokens: s (NeMo-RL 0.5)",
            "92.8",
            f"{rl_step(eight, 'H100', 16, 2048, 0, 1019, **grpo):.0f}",
        ),
        (
            "PPO of 7 B with critic and reward model, 16 A800, 1,024 prompts: s (OpenRLHF, DeepSpeed-Chat)",
            "471, 855",
            f"{rl_step(seven, 'A800', 16, 1024, 1024, 1024, **ppo):.0f}",
        ),
        (
            "the same of 70 B, 32 A800, sampled from the sharded policy: s",
            "4,489, 10,407",
            ", with one link ".join(
                f"{rl_step(seventy, 'A800', 32, 1024, 1024, 1024, **ppo, copies=False, links=links):,.0f}"
                for links in (MACHINE, 1)
            ),
        ),
    ]
    return rows


# ---------------------------------------------------------------------------------------------- what is sent


def gathered_bytes(shape: Shape) -> float:
    """Bytes of all weights as a pass gathers them: blocks in bfloat16, embeddings and head in float32."""
    return 2 * shape.layer * shape.layers + 4 * shape.ends


def over_ring(size: float, gpus: int, shard: Shard = True) -> Sent:
    """What gathering or scattering `size` bytes sends among the GPUs that shard a model.

    In a ring of N each sends ``(N - 1) / N`` of them to the next. A ring over several machines leaves each one once.
    """
    among = min(gpus, MACHINE) if shard == "hybrid" else gpus
    sent = size * (among - 1) / among
    return Sent(sent, sent if among > MACHINE else 0.0)


def sent_in_pass(shape: Shape, gpus: int, shard: Shard = True) -> Sent:
    """What a pass sends that gathers all weights once, as each token that is sampled from the shards does."""
    return over_ring(gathered_bytes(shape), gpus, shard)


def sent_in_step(shape: Shape, gpus: int, shard: Shard = True) -> Sent:
    """What a training step of one microbatch sends.

    Weights are gathered for the forward and for the backward pass, and gradients are summed in float32. Of a hybrid
    division each GPU then sums its rows with those of the other machines, which takes a ring twice as many bytes.
    """
    gradients = 4 * shape.weights
    sent = 2 * sent_in_pass(shape, gpus, shard) + over_ring(gradients, gpus, shard)
    machines = max(1, gpus // MACHINE)
    return sent + Sent(0.0, 2 * gradients * (machines - 1) / machines if shard == "hybrid" else 0.0)


def sent_in_iteration(
    models: PPOModels, gpus: int, shard: Shard, *, copies: bool, response: int = RESPONSE
) -> Iteration:
    """What a PPO iteration sends whose scoring and update are one microbatch each."""
    policy = models.policy
    copy = over_ring(4 * policy.weights, gpus, shard)  # the rows that are trained are float32
    rollout = copy if copies else response * sent_in_pass(policy, gpus, shard)
    scoring = sum((sent_in_pass(shape, gpus, shard) for shape in models), Sent())
    update = sum((sent_in_step(shape, gpus, shard) for shape in (policy, models.value)), Sent())
    return Iteration(rollout, scoring, update)


# ---------------------------------------------------------------------------------------------------- seconds


def computing(shape: Shape, tokens: float = TOKENS, gpu: str = "H100") -> float:
    """Seconds of a training step: six operations for each weight and token, and two to compute layers again."""
    return 8 * shape.weights * tokens / FLOPS[gpu]


def ppo_passes_s(models: PPOModels) -> float:
    """Seconds of reading the prompts, of four scoring passes, and of the updates of policy and value model."""
    policy, value = models.policy, models.value
    forward = sum(shape.weights for shape in models) * TOKENS + policy.weights * ROWS * PROMPT
    return 2 * forward / FLOPS["H100"] + computing(policy) + computing(value)


def sampling_s(shape: Shape, gpu: str, rows: float, prompt: int, response: int) -> float:
    """Seconds in which a GPU reads, for each token, all weights in bfloat16 and the keys and values so far."""
    cache = rows * (prompt + response / 2) * 2 * shape.cache
    return response * (2 * shape.weights + cache) / MEMORY[gpu]


def speed_of_sft(shape: Shape, gpus: int, links: int) -> float:
    """Tokens a second on each GPU: computing and sending overlap."""
    return TOKENS / max(computing(shape), sent_in_step(shape, gpus).seconds(links))


def rl_step(
    shape: Shape,
    gpu: str,
    gpus: int,
    num_rows: int,
    prompt: int,
    response: int,
    *,
    trained_models: int,
    passes: int,
    copies: bool = True,
    links: int = MACHINE,
) -> float:
    """Seconds of an RL step: sampling, `passes` scoring passes, and the update of `trained_models` models.

    All models have the shape of the policy. The weights that are sampled from come over the network before the first
    token or, without `copies`, for each. In the other passes computing and sending overlap.
    """
    rows = num_rows / gpus
    tokens = rows * (prompt + response)
    computes = 2 * (1 + passes) * shape.weights * tokens / FLOPS[gpu] + trained_models * computing(shape, tokens, gpu)
    sends = passes * sent_in_pass(shape, gpus) + trained_models * sent_in_step(shape, gpus)
    copy = over_ring(4 * shape.weights, gpus) if copies else response * sent_in_pass(shape, gpus)
    sampling = sampling_s(shape, gpu, rows, prompt, response)
    return copy.seconds(links, gpu) + sampling + max(computes, sends.seconds(links, gpu))


# ----------------------------------------------------------------------------------------------------- memory


def planned(
    name: str,
    gpus: int,
    *,
    tokens: int = TOKENS,
    shard: Shard = True,
    gradient_checkpointing: bool = True,
    lora: dict[str, Any] | None = None,
) -> StagePlan:
    """The plan of SFT of a model in SIZES on this many GPUs of 80 GB, each with `tokens` tokens in a step."""
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**SIZES[name], dtype="bfloat16").save_pretrained(folder)
        config = SFTConfig.model_validate(
            {
                "artifacts": "a",
                "model": {"path": folder, "lora": lora},
                "data": {"train": "rows.jsonl", "max_length": tokens},
                "training": {"num_steps": 1, "minibatch_size": gpus, "tokens_per_microbatch": tokens},
                "optimizer": {"learning_rate": 1e-5},
                "gradient_checkpointing": gradient_checkpointing,
                "distributed": {"shard": shard},
            }
        )
        return plan_stage("sft", config, ModelOrigins({"sft": config}), Machine("cuda", 80e9, gpus))


def planned_ppo(name: str, gpus: int, shard: Shard, *, copies: bool) -> StagePlan:
    """The plan of a PPO iteration of one optimizer step, of four models of a shape in SIZES."""
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**SIZES[name], dtype="bfloat16", num_labels=1).save_pretrained(folder)
        config = PPOConfig.model_validate(
            {
                "artifacts": "a",
                "policy": {"path": folder},
                "rewards": [{"type": "reward_model", "path": folder}],
                "data": {"train": "rows.jsonl", "max_prompt_length": PROMPT},
                "rollout": {"max_new_tokens": RESPONSE, "decoder": "auto" if copies else "sharded"},
                "ppo": {
                    "num_iterations": 1,
                    "rollout_batch_size": ROWS * gpus,
                    "minibatch_size": ROWS * gpus,
                    "ppo_epochs": 1,
                    "tokens_per_microbatch": TOKENS,
                    "kl_coef": 0.05,
                },
                "optimizer": {"learning_rate": 1e-6},
                "gradient_checkpointing": True,
                "distributed": {"shard": shard},
            }
        )
        return plan_stage("ppo", config, ModelOrigins({"ppo": config}), Machine("cuda", 80e9, gpus))


def models_of(plan: StagePlan) -> PPOModels:
    """The models of a plan of PPO."""
    shapes = {held.name: held.shape for held in plan.models}
    return PPOModels(*(shapes[name] for name in ("policy", "value model", "reference policy", "reward model")))


if __name__ == "__main__":
    main()
