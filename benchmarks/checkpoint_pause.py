"""Measure how long a checkpoint pauses a run, written in the background and in the foreground.

    python benchmarks/checkpoint_pause.py --work DIR

For the model of configs/support and two larger Llamas: the size of the state (weights and AdamW's two moments, all
float32), the pause of a checkpoint as the stages save it, the pause if it is written in the foreground (copy, write,
digests, fsync), and the seconds that the writer alone takes. Medians. DIR must be on the disk to measure, with 5 GB
free.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.config.stage import Optimizer
from rlhf_cli.processes.environment import set_up_process
from rlhf_cli.run.checkpoint import CheckpointStore, Weights
from rlhf_cli.run.checkpoint_files import list_checkpoints
from rlhf_cli.training.optimizer import Stepper, build_stepper

ROOT = Path(__file__).resolve().parent.parent
LARGER = {
    "25 M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 16_000},
    "100 M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 10_000},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    support = load_config(ROOT / "configs/support/sft.yaml", SFTConfig).model.scratch
    assert support is not None
    sizes = {"configs/support": {**support.config, "vocab_size": support.tokenizer.vocab_size}, **LARGER}
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}")
    print("| model | parameters | state | pause | in the foreground | the writer takes |")
    print("|---|---|---|---|---|---|")
    for name, settings in sizes.items():
        model = LlamaForCausalLM(LlamaConfig(**{"num_attention_heads": settings["hidden_size"] // 64, **settings}))
        print(measured(name, model, args.work, args.times), flush=True)


def measured(name: str, model: LlamaForCausalLM, work: Path, times: int) -> str:
    """A row of the table."""
    stepper = build_stepper(model, Optimizer(learning_rate=1e-4, schedule="constant"), 1)
    step(model, stepper)
    place = work / "checkpoint_pause"
    place.mkdir(parents=True)
    try:
        checkpoints = CheckpointStore(place, keep=1)
        checkpoints.parts = {"model": Weights(model), "optimizer": stepper}
        pauses, wholes = [], []
        for number in range(times + 1):
            started = time.perf_counter()
            # As in StageRun.finish_step: a state with NaN or infinite weights is not saved.
            assert checkpoints.not_finite() is None
            checkpoints.save(number)
            pauses.append(time.perf_counter() - started)
            checkpoints.wait()
            wholes.append(time.perf_counter() - started)
        size = sum(path.stat().st_size for path in list_checkpoints(place)[-1].iterdir())
    finally:
        shutil.rmtree(place)
    # The first run is a warm-up.
    pause, whole = statistics.median(pauses[1:]), statistics.median(wholes[1:])
    count = sum(p.numel() for p in model.parameters())
    return f"| {name} | {count:,} | {size / 1e6:,.1f} MB | {pause:.3f} s | {whole:.3f} s | {whole - pause:.3f} s |"


def step(model: LlamaForCausalLM, stepper: Stepper) -> None:
    """Take one training step, so that the optimizer has its moments."""
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()
    stepper.advance()


if __name__ == "__main__":
    set_up_process()
    main()
