"""Measure what gradient checkpointing, bfloat16 and torch.compile cost on this machine: seconds and memory of a step.

    python benchmarks/passes.py
    python benchmarks/passes.py --models a b c --choices float32 bfloat16

One SFT step (forward and backward, packed, 16 rows of lognormal lengths, other ones in each step, all tokens but the
first learned) on one core, for the models a (1 million weights), b (23 million) and c (98 million). Each model and
option has its own processes, which take turns: medians over `--times` processes of the last six of twelve steps, in
processor seconds. Memory is the rise of the process's peak above a step on two short rows. A decoding step draws the
next token of 8 responses.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_cli.algorithms.losses import lm_loss
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.decoders.decoder import choose_decoder
from rlhf_cli.models.forward import autocast, target_logprobs
from rlhf_cli.models.load import prepare
from rlhf_cli.models.passes import has_bfloat16, set_up_passes
from rlhf_cli.processes.environment import set_up_process

CPU = torch.device("cpu")
MODELS = {
    "a": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4},
    "b": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8},
    "c": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
}
VOCABULARY = {"a": 2048, "b": 8192, "c": 16_384}
RESPONSES, TOKENS = 8, 20
"""Of decoding: rows, and steps of each."""
CHOICES = {
    "float32": {"precision": "float32"},
    "bfloat16": {"precision": "bfloat16"},
    "gradient_checkpointing": {"precision": "float32", "gradient_checkpointing": True},
    "compile": {"precision": "float32", "compile": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["a", "b"])
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "CHOICE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(*args.one)))
        return
    print(f"bfloat16 in hardware: {has_bfloat16(CPU)}")
    print("| model | option | step, s | of float32 | memory, MB | compiling, s | decoding step, ms | of float32 |")
    print("|---|---|---|---|---|---|---|---|")
    for model in args.models:
        runs: dict[str, list[list[float]]] = {choice: [] for choice in args.choices}
        for _ in range(args.times):
            for choice, own in runs.items():
                command = [sys.executable, __file__, "--one", model, choice]
                own.append(json.loads(subprocess.run(command, capture_output=True, check=True).stdout.splitlines()[-1]))
        medians = {
            choice: [statistics.median(column) for column in zip(*own, strict=True)] for choice, own in runs.items()
        }
        for choice, (seconds, memory, compiling, decoding) in medians.items():
            ratios = [own / medians["float32"][i] for i, own in ((0, seconds), (3, decoding))]
            cells = f"{seconds:.3f} | {ratios[0]:.2f} | {memory:.0f} | {compiling:.0f} | {1e3 * decoding:.1f}"
            print(f"| {model} | {choice} | {cells} | {ratios[1]:.2f} |", flush=True)


def measured(name: str, choice: str) -> tuple[float, float, float, float]:
    """Processor seconds of a step, MB above a short one, seconds of compiling, processor seconds of a decoding step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = VOCABULARY[name]
    model = LlamaForCausalLM(LlamaConfig(vocab_size=size, tie_word_embeddings=True, **MODELS[name])).train()
    prepare(model, CPU)
    config = SFTConfig(
        artifacts="none",
        model={"path": "none"},
        data={"train": "none"},
        training={"num_steps": 1},
        optimizer={"learning_rate": 1e-3},
        **CHOICES[choice],
    )
    _, compiling = set_up_passes([model], config, CPU)
    draw = random.Random(0)
    step(model, [row[:8] for row in drawn(draw, size)[:2]], config.precision)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(12):
        rows = drawn(draw, size)
        began = time.process_time()
        step(model, rows, config.precision)
        seconds.append(time.process_time() - began)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    decoding = decoding_step(model.eval(), rows[0], config.precision)
    return statistics.median(seconds[6:]), (after - before) / 1024, compiling, decoding


def drawn(draw: random.Random, size: int) -> list[list[int]]:
    """Rows of random tokens; their number differs from step to step, as in a run."""
    lengths = [max(8, min(256, round(draw.lognormvariate(4.49, 0.42)))) for _ in range(16)]
    return [[draw.randrange(size) for _ in range(length)] for length in lengths]


@torch.no_grad()
def decoding_step(model: LlamaForCausalLM, prompt: list[int], precision: str) -> float:
    """Processor seconds for the next token of each response."""
    with autocast(CPU, precision):
        decoder = choose_decoder(model, len(prompt) + TOKENS)
        logits = decoder.admit([[*prompt[:-1], row] for row in range(RESPONSES)])
        logits = decoder.step(logits.argmax(1))
        began = time.process_time()
        for _ in range(TOKENS - 2):
            logits = decoder.step(logits.argmax(1))
    return (time.process_time() - began) / (TOKENS - 2)


def step(model: LlamaForCausalLM, rows: list[list[int]], precision: str) -> None:
    with autocast(CPU, precision):
        logprobs = target_logprobs(model, rows, [[False] + [True] * (len(row) - 1) for row in rows])
    lm_loss(logprobs, num_tokens=len(logprobs))[0].backward()
    model.zero_grad(set_to_none=False)


if __name__ == "__main__":
    set_up_process()
    main()
