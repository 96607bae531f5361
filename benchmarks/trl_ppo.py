"""Run the PPOTrainer of TRL 1.12.0 from the models of `rlhf sft` and `rlhf rm`.

    python benchmarks/trl_ppo.py --config ARTIFACTS/ppo/config.yaml --sft ARTIFACTS/sft/model \
        --rm ARTIFACTS/rm/model --out DIR

Runs in TRL's own environment (`trl-constraints.txt`) and imports nothing of ours: it reads the artifacts with
transformers alone. The settings come from the resolved ppo config, so that both trainers read one file; the options are
those in which TRL may differ. The README lists what cannot be made equal.

Writes  DIR/model          the policy, saved by save_pretrained
        DIR/result.json    every setting, versions, seconds of `train()`, TRL's log (one row per update), and what shows
                           that both sides have the same task: a digest of the prompts, and some scores
"""

import argparse
import gzip
import hashlib
import json
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.experimental.utils import get_reward

VERSION = "1.12.0"
TRL_ONLY_HAS = {
    "advantage_estimator": "gae",
    "objective": "clip",
    "loss_aggregation": "token",
    "kl_in": "reward",
    "kl_estimator": None,
    "kl_controller": "fixed",
    "score_normalization": "none",
    "score_clip": None,
    "entropy_coef": 0.0,
    "num_rollouts_per_update": 1,
}
"""Settings that TRL's trainer fixes; a config with other values is refused."""


def main() -> None:
    """Train, and write the files that the module's docstring lists."""
    arguments = parse()
    if version("trl") != VERSION:
        raise SystemExit(f"this script was written for trl {VERSION}, found {version('trl')}")
    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    seed = int(config["seed"])

    # The trainer seeds torch but draws its minibatches with numpy, which it does not seed.
    set_seed(seed)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.sft, padding_side="left")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        raise SystemExit(f"{arguments.sft}: TRL removes the padding token from every text, so it must not be EOS")
    prompt_ids = read_prompt_ids(Path(config["data"]["train"][0]["path"]), tokenizer)
    dataset = Dataset.from_dict({"input_ids": prompt_ids})

    settings = trl_settings(config, arguments)
    trainer = PPOTrainer(
        args=PPOConfig(
            **settings,
            seed=seed,
            output_dir=str(arguments.out / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            num_sample_generations=0,
            report_to=[],
            save_strategy="no",
            eval_strategy="no",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(arguments.sft, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(arguments.sft, dtype=torch.float32),
        reward_model=load_reward_model(arguments.rm),
        value_model=load_value_model(arguments.rm, arguments.value_head),
        train_dataset=dataset,
        # Never read, since nothing is evaluated, but the trainer builds a loader over it.
        eval_dataset=dataset,
    )
    start = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - start

    policy = trainer.accelerator.unwrap_model(trainer.model).policy
    policy.save_pretrained(arguments.out / "model")
    tokenizer.save_pretrained(arguments.out / "model")
    log = [row for row in trainer.state.log_history if "val/ratio" in row]
    result = {
        "settings": settings | {"value_head": arguments.value_head, "seed": seed},
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "accelerate")},
        "prompts": hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest(),
        "scores": bare_scores(trainer.reward_model, prompt_ids[:64], tokenizer),
        "seconds": seconds,
        "log": log,
    }
    (arguments.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def trl_settings(config: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Translate our resolved ppo config into TRL's.

    TRL steps its schedule once per update (rollout), we once per optimizer step, so the warm-up is converted.
    Accumulation is 1, since TRL steps the optimizer only every `gradient_accumulation_steps` backward passes, whatever
    its minibatches are.
    """
    ppo, rollout, optimizer = config["ppo"], config["rollout"], config["optimizer"]
    for key, value in TRL_ONLY_HAS.items():
        if ppo[key] != value:
            raise SystemExit(f"ppo.{key}: {ppo[key]}, TRL's trainer supports only {value}")
    if optimizer["schedule"] != "linear" or optimizer["min_lr_ratio"] or optimizer["weight_decay"]:
        raise SystemExit("optimizer: must be linear to 0 without weight decay, as TRL is set here")
    num_minibatches = ppo["rollout_batch_size"] // ppo["minibatch_size"]
    warmup = optimizer["warmup_steps"] / (ppo["ppo_epochs"] * num_minibatches)
    updates = arguments.updates or ppo["num_iterations"]
    return {
        "total_episodes": updates * ppo["rollout_batch_size"],
        "per_device_train_batch_size": ppo["rollout_batch_size"],
        "gradient_accumulation_steps": 1,
        "num_mini_batches": num_minibatches,
        "num_ppo_epochs": ppo["ppo_epochs"],
        "local_rollout_forward_batch_size": ppo["rollout_batch_size"],
        "learning_rate": arguments.learning_rate or optimizer["learning_rate"],
        "lr_scheduler_type": "linear",
        "warmup_steps": round(warmup) if arguments.warmup_updates is None else arguments.warmup_updates,
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
        "adam_epsilon": optimizer["eps"],
        "kl_coef": ppo["kl_coef"],
        "cliprange": ppo["clip_range"],
        "cliprange_value": ppo["value_clip_range"],
        "vf_coef": ppo["vf_coef"],
        "gamma": ppo["gamma"],
        "lam": ppo["gae_lambda"],
        "response_length": rollout["max_new_tokens"],
        "temperature": rollout["temperature"],
        "stop_token": "eos",
        "missing_eos_penalty": ppo["missing_eos_penalty"],
    }


def load_reward_model(path: Path) -> Any:
    """The reward model with its normalisation, (score - score_mean) / score_std, folded into the head.

    TRL has no reward normalisation and reads `model.score` at the last token, so the head does it.
    """
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    mean, std = model.config.score_mean, model.config.score_std
    head = torch.nn.Linear(model.score.in_features, 1)
    with torch.no_grad():
        head.weight.copy_(model.score.weight / std)
        head.bias.fill_(-mean / std)
    model.score = head
    return model.eval()


def load_value_model(path: Path, head: str) -> Any:
    """The value model: the reward model with its normalised head, or with a head of zeros as ours has."""
    model = load_reward_model(path)
    if head == "zero":
        torch.nn.init.zeros_(model.score.weight)
        torch.nn.init.zeros_(model.score.bias)
    return model


def read_prompt_ids(path: Path, tokenizer: Any) -> list[list[int]]:
    """The tokens of the `prompt` of every row of a .jsonl or .jsonl.gz file."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    return [list(ids) for ids in tokenizer(prompts)["input_ids"]]


@torch.no_grad()
def bare_scores(reward_model: torch.nn.Module, prompt_ids: list[list[int]], tokenizer: Any) -> list[float]:
    """TRL's score of each prompt followed by EOS alone; our side checks that it gives the same."""
    queries = tokenizer.pad({"input_ids": prompt_ids}, return_tensors="pt")["input_ids"]
    replies = torch.tensor([[tokenizer.eos_token_id, tokenizer.pad_token_id]]).expand(len(queries), 2)
    _, scores, _ = get_reward(reward_model, torch.cat((queries, replies), 1), tokenizer.pad_token_id, queries.shape[1])
    return [float(score) for score in scores]


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="our resolved ppo config")
    parser.add_argument("--sft", type=Path, required=True, help="model directory: policy and ref_policy")
    parser.add_argument("--rm", type=Path, required=True, help="model directory: reward model and value model's start")
    parser.add_argument("--out", type=Path, required=True, help="where model/ and result.json are written")
    parser.add_argument("--updates", type=int, help="rollouts; default: the config's num_iterations")
    parser.add_argument("--learning-rate", type=float, help="without it the config's")
    parser.add_argument("--warmup-updates", type=int, help="in updates; default: the config's warm-up")
    parser.add_argument("--value-head", choices=("rm", "zero"), default="rm")
    return parser.parse_args()


if __name__ == "__main__":
    main()
