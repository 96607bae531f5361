"""Try the recipes for a laptop on random models of the shape of SmolLM2, Qwen3 and Pythia, and time their steps.

    python benchmarks/small_models.py --work DIR --data helpful-base/test.jsonl.gz [--only smollm2-135m] [--steps 2]

For each recipe (configs/NAME) it writes a random model with the published shape and vocabulary size to DIR/NAME, runs
SFT, RM and PPO on it, each in a process of its own on one thread, and prints a row of
SMALL_MODELS.md: processor seconds of the fastest step, scaled from ROWS rows to the rows of the recipe's step, and the
peak memory of the process. The weights are random, so this says nothing about quality.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = 4
"""Rows of a measured step: preference pairs in RM, responses in PPO."""
SMOLLM2 = {"vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "smollm2-135m": (
        "llama",
        134_515_008,
        {
            **SMOLLM2,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "smollm2-360m": (
        "llama",
        361_821_120,
        {
            **SMOLLM2,
            "hidden_size": 960,
            "intermediate_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
        },
    ),
    "qwen3-0.6b": (
        "qwen3",
        596_049_920,
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "pythia-160m": (
        "gpt_neox",
        162_322_944,
        {
            "vocab_size": 50304,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
    ),
}
"""Folder in configs/ -> architecture, parameters by the model's card, and its published config.json where that differs
from the architecture's defaults."""


def main() -> None:
    """Run what is asked for, and print a table."""
    parser = argparse.ArgumentParser(description="Try the recipes for a laptop on random models.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="HH-RLHF's helpful-base/test.jsonl.gz")
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    print("| recipe | stage | rows of a step | processor seconds of a step | peak GB |\n|---|---|---|---|---|")
    for name in args.only:
        model = args.work / name / "model"
        if not (model / "tokenizer.json").is_file():
            in_own_process(write_model, name, model, args.data)
        for stage in ("sft", "rm", "ppo"):
            found = in_own_process(run_stage, name, stage, args.work / name, args.data, args.steps)
            seconds = min(found["seconds"]) / ROWS * found["rows"]
            print(f"| {name} | {stage} | {found['rows']} | {seconds:.0f} | {found['peak'] / 1e9:.1f} |", flush=True)


def in_own_process(function: Any, *arguments: Any) -> Any:
    """What the function returns in a new process, whose peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def config_of(name: str) -> Any:
    """The model's configuration."""
    from transformers import AutoConfig

    architecture, _, shape = SHAPES[name]
    return AutoConfig.for_model(architecture, **shape, dtype="bfloat16", bos_token_id=0, eos_token_id=0, pad_token_id=0)


def write_model(name: str, folder: Path, data: Path) -> None:
    """Write random weights, and a tokenizer trained on the data and filled up to the vocabulary with unused tokens."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from rlhf_cli.config.models import TokenizerTraining
    from rlhf_cli.models.scratch import SPECIAL_TOKENS, train_tokenizer
    from rlhf_cli.processes.environment import set_up_process

    set_up_process()
    import torch

    with gzip.open(data, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["chosen"] for line in file]
    learned = train_tokenizer(texts, TokenizerTraining(vocab_size=8192))
    content = json.loads(learned.backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"<unused {i}>": i for i in range(len(vocabulary), SHAPES[name][2]["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), **SPECIAL_TOKENS)
    config = config_of(name)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert model.num_parameters() == SHAPES[name][1], model.num_parameters()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def overrides(stage: str, work: Path, data: Path, steps: int) -> list[str]:
    """The settings of a trial: the recipe's, but `steps` steps of ROWS rows and hardly any evaluation."""
    source = f'{{path: {data}, select: "PARTS"}}'
    common = [
        f"artifacts={work / 'run'}",
        f"data.train={source.replace('PARTS', '1/10')}",
        f"data.test={source.replace('PARTS', '0/100')}",
        "threads=1",
        "checkpoints.every_minutes=null",
    ]
    if stage == "ppo":
        sizes = {"num_iterations": steps, "rollout_batch_size": ROWS, "minibatch_size": ROWS}
        return [*common, *(f"ppo.{key}={value}" for key, value in sizes.items()), "evaluation.num_prompts=2"]
    limits = ["training.num_epochs=null", f"training.num_steps={steps}", f"training.minibatch_size={ROWS}"]
    limits += ["evaluation.max_rows=4", "evaluation.max_new_tokens=4"]
    if stage == "sft":
        return [*common, *limits, f"model.path={work / 'model'}"]
    return [*common, *limits, "evaluation.num_normalization_samples=2"]


def run_stage(name: str, stage: str, work: Path, data: Path, steps: int) -> dict[str, Any]:
    """Run a stage of a recipe for some steps; the processor seconds of each, and the peak of the process's memory."""
    from rlhf_cli.processes.environment import set_up_process

    set_up_process()
    import torch

    from rlhf_cli.config.by_stage import load_stage_config
    from rlhf_cli.run.launch import load_stage
    from rlhf_cli.run.stage_run import StageRun

    torch.set_num_threads(1)
    path = ROOT / "configs" / name / f"{stage}.yaml"
    recipe = load_stage_config(stage, path)
    rows = recipe.ppo.rollout_batch_size if stage == "ppo" else recipe.training.minibatch_size  # type: ignore[union-attr]
    ends: list[float] = []
    finish_step = StageRun.finish_step

    def finish(self: StageRun, step: int, total: int) -> None:
        ends.append(time.process_time())
        finish_step(self, step, total)

    StageRun.finish_step = finish  # type: ignore[method-assign]
    config = load_stage_config(stage, path, overrides(stage, work, data, steps))
    run = load_stage(stage)
    run(config, quiet=True, restart=True)
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "rows": rows, "peak": peak}


if __name__ == "__main__":
    main()
