"""TRL's side of benchmarks/speed.py: SFTTrainer and RewardTrainer of 1.16.0, PPOTrainer of 1.12.0, HF `generate`.

    python benchmarks/speed_trl.py TASK.json

Runs in TRL's own environments and imports nothing of ours. Each trainer is TRL's with its own loop; it waits in a
callback where a step ends. Only settings that make it faster on a CPU differ from its defaults: bf16 only where the
processor multiplies in it, no gradient checkpointing, no logging, no progress bar, no checkpoints.
"""

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

TASK = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))

from speed_gate import Facts, Gate  # noqa: E402

GATE = Gate(TASK["cores"])  # Before torch counts the cores.

import torch  # noqa: E402
from datasets import Dataset, disable_caching  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

disable_caching()
ON_GPU = TASK.get("gpu", False)
IN_BFLOAT16 = ON_GPU or TASK.get("precision") == "bfloat16"
FROZEN = torch.bfloat16 if IN_BFLOAT16 else torch.float32
"""Type of weights that are not trained: outside autocast, `generate` and these models would compute in float32."""
TRAINED = torch.bfloat16 if ON_GPU else torch.float32
"""Type of trained weights. On a CPU both sides keep them in float32."""
COMMON = {
    "use_cpu": not ON_GPU,
    "bf16": IN_BFLOAT16,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}
LAST: dict[str, Any] = {}
"""Batch and loss of the step that is being timed."""


class Steps(TrainerCallback):
    """Wait at the gate before the first step and after each step."""

    def __init__(self, facts: Any):
        self.facts = facts

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        GATE.arrive()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        GATE.arrive(self.facts)


def main() -> None:
    """Run the task until the driver ends it."""
    if TASK["kind"] != "rollout" and version("trl") != TASK["trl"]:
        raise SystemExit(f"{TASK['kind']} is measured against trl {TASK['trl']}, found {version('trl')}")
    torch.set_num_threads(len(TASK["cores"]))
    {"sft": sft, "rm": rm, "ppo": ppo, "rollout": rollout}[TASK["kind"]]()


def sft() -> None:
    """Run SFTTrainer on tokenised rows, in our order or packed by TRL."""
    from trl import SFTConfig, SFTTrainer

    class Watched(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            LAST["inputs"] = dict(inputs)
            LAST["loss"] = super().training_step(model, inputs, *given, **named)
            return LAST["loss"]

    def facts() -> Facts:
        inputs = LAST["inputs"]
        loss = float(LAST["loss"])
        if "attention_mask" not in inputs:
            return {"units": inputs["input_ids"].numel(), "computed": inputs["input_ids"].numel(), "loss": loss}
        ids = real_rows(inputs["input_ids"], inputs["attention_mask"])
        computed = inputs["input_ids"].numel()
        return {"units": sum(map(len, ids)), "computed": computed, "loss": loss, "batch": digest(ids)}

    GATE.mark_base()
    rows = read_rows()
    trainer = Watched(
        model=AutoModelForCausalLM.from_pretrained(TASK["model"], dtype=TRAINED),
        args=SFTConfig(
            output_dir=TASK["out"],
            per_device_train_batch_size=TASK["batch_size"],
            max_steps=TASK["steps"],
            learning_rate=TASK["learning_rate"],
            max_length=TASK["max_length"],
            completion_only_loss=True,
            packing=TASK["packing"],
            train_sampling_strategy="sequential",
            **COMMON,
        ),
        train_dataset=Dataset.from_list(
            [{"input_ids": row["ids"], "completion_mask": row["completion_mask"]} for row in rows]
        ),
        processing_class=AutoTokenizer.from_pretrained(TASK["model"]),
        callbacks=[Steps(facts)],
    )
    trainer.train()


def rm() -> None:
    """Run RewardTrainer on tokenised pairs, in our order."""
    from trl import RewardConfig, RewardTrainer

    class Watched(RewardTrainer):
        def training_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            LAST["inputs"] = dict(inputs)
            LAST["loss"] = super().training_step(model, inputs, *given, **named)
            return LAST["loss"]

    def facts() -> Facts:
        inputs = LAST["inputs"]
        ids = real_rows(inputs["input_ids"], inputs["attention_mask"])
        return {
            "units": len(ids) // 2,
            "computed": inputs["input_ids"].numel(),
            "loss": float(LAST["loss"]),
            "batch": digest(ids),
        }

    GATE.mark_base()
    trainer = Watched(
        model=AutoModelForSequenceClassification.from_pretrained(TASK["model"], dtype=TRAINED),
        args=RewardConfig(
            output_dir=TASK["out"],
            per_device_train_batch_size=TASK["batch_size"],
            max_steps=TASK["steps"],
            learning_rate=TASK["learning_rate"],
            max_length=TASK["max_length"],
            train_sampling_strategy="sequential",
            **COMMON,
        ),
        train_dataset=Dataset.from_list(read_rows()),
        processing_class=AutoTokenizer.from_pretrained(TASK["model"]),
        callbacks=[Steps(facts)],
    )
    trainer.train()


def ppo() -> None:
    """Run PPOTrainer with four models from our files, on the same prompts in the same order."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    generated = ppo_trainer.batch_generation

    def remembered(model: Any, queries: Any, *given: Any) -> Any:
        result = generated(model, queries, *given)
        LAST["queries"], LAST["query_responses"] = queries, result[0]
        return result

    ppo_trainer.batch_generation = remembered

    class Watched(PPOTrainer):
        def log(self, logs: dict[str, float], *_: Any, **__: Any) -> None:
            LAST["log"] = logs

    def facts() -> Facts:
        queries, responses = LAST["queries"], LAST["query_responses"][:, LAST["queries"].shape[1] :]
        prompts = real_rows(queries, queries != tokenizer.pad_token_id)
        lengths = response_lengths(responses, tokenizer.eos_token_id)
        return {
            "units": len(prompts),
            "batch": digest(prompts),
            "prompt_lengths": list(map(len, prompts)),
            "response_lengths": lengths.tolist(),
            "ended": int((responses == tokenizer.eos_token_id).any(1).sum()),
            "computed": LAST["query_responses"].numel(),
            "kl": LAST["log"]["objective/kl"],
            "score": LAST["log"]["objective/scores"],
            "ratio": LAST["log"]["val/ratio"],
        }

    GATE.mark_base()
    tokenizer = AutoTokenizer.from_pretrained(TASK["policy"], padding_side="left")
    dataset = Dataset.from_list([{"input_ids": ids} for batch in TASK["batches"] for ids in batch])
    size = len(TASK["batches"][0])
    trainer = Watched(
        args=PPOConfig(
            output_dir=TASK["out"],
            total_episodes=size * len(TASK["batches"]),
            per_device_train_batch_size=TASK["microbatch_size"],
            gradient_accumulation_steps=size // TASK["microbatch_size"],
            num_mini_batches=1,
            num_ppo_epochs=TASK["epochs"],
            local_rollout_forward_batch_size=size,
            response_length=TASK["max_new_tokens"],
            stop_token="eos",
            temperature=TASK["temperature"],
            kl_coef=TASK["kl_coef"],
            vf_coef=TASK["vf_coef"],
            cliprange=0.2,
            cliprange_value=0.2,
            gamma=1.0,
            lam=0.95,
            missing_eos_penalty=1.0,
            learning_rate=TASK["learning_rate"],
            num_sample_generations=0,
            eval_strategy="no",
            **COMMON,
        ),
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(TASK["policy"], dtype=TRAINED),
        ref_model=AutoModelForCausalLM.from_pretrained(TASK["policy"], dtype=FROZEN),
        reward_model=AutoModelForSequenceClassification.from_pretrained(TASK["reward_model"], dtype=FROZEN),
        value_model=AutoModelForSequenceClassification.from_pretrained(TASK["value_model"], dtype=TRAINED),
        train_dataset=dataset,
        eval_dataset=dataset,  # Never read, but the trainer builds a loader over it.
        callbacks=[Steps(facts)],
    )
    # Its own loader shuffles; this one gives the order of both sides.
    trainer.dataloader = torch.utils.data.DataLoader(
        dataset, batch_size=size, shuffle=False, collate_fn=trainer.data_collator, drop_last=True
    )
    GATE.actions["compare"] = lambda command: compare(trainer, tokenizer, Path(command["path"]))
    trainer.train()


@torch.no_grad()
def compare(trainer: Any, tokenizer: Any, path: Path) -> Facts:
    """Compare TRL's log-probabilities, values and scores of our first rollout with ours.

    Returns the largest difference over all real tokens, divided by the largest compared number if that is above 1.
    Computed as in PPOTrainer.train, with the functions that it calls.
    """
    from trl.experimental.ppo.ppo_trainer import forward, get_reward, selective_log_softmax

    kept = json.loads(path.read_text(encoding="utf-8"))
    pad = tokenizer.pad_token_id
    width, longest = max(map(len, kept["prompts"])), max(map(len, kept["responses"]))
    rows = [
        [pad] * (width - len(prompt)) + prompt + response + [pad] * (longest - len(response))
        for prompt, response in zip(kept["prompts"], kept["responses"], strict=True)
    ]
    query_responses = torch.tensor(rows, device=trainer.accelerator.device)
    responses = query_responses[:, width:]
    model = trainer.accelerator.unwrap_model(trainer.model)

    def logprobs(policy: Any) -> torch.Tensor:
        logits = forward(policy, query_responses, pad).logits[:, width - 1 : -1]
        logits /= trainer.args.temperature + 1e-7
        return selective_log_softmax(logits, responses)

    values, _, _ = get_reward(model.value_model, query_responses, pad, width)
    _, scores, _ = get_reward(trainer.reward_model, query_responses, pad, width)
    theirs = {
        "logprobs": logprobs(model.policy),
        "ref_logprobs": logprobs(trainer.ref_model),
        "values": values[:, width - 1 : -1].squeeze(-1),
    }
    gaps = {}
    for name, tensor in theirs.items():
        own = torch.tensor([x for row in kept[name] for x in row])
        other = torch.cat([row[: len(mine)] for row, mine in zip(tensor, kept[name], strict=True)])
        gaps[name] = gap(own, other.float().cpu())
    return {"gaps": gaps | {"scores": gap(torch.tensor(kept["scores"]), scores.float().cpu())}}


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, divided by the largest number if that is above 1."""
    return ((a - b).abs().max() / a.abs().max().clamp_min(1.0)).item()


def rollout() -> None:
    """Run HF `generate` on the same batches of prompts: same temperature, no filter, no scores kept."""
    GATE.mark_base()
    tokenizer = AutoTokenizer.from_pretrained(TASK["policy"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(TASK["policy"], dtype=FROZEN).eval()
    GATE.arrive()
    for prompts in TASK["batches"]:
        batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        width = batch["input_ids"].shape[1]
        ids = model.generate(
            **batch,
            do_sample=True,
            temperature=TASK["temperature"],
            top_k=0,
            top_p=1.0,
            max_new_tokens=TASK["max_new_tokens"],
        )
        lengths = response_lengths(ids[:, width:], tokenizer.eos_token_id)
        given = {
            "units": int(lengths.sum()),
            "batch": digest(prompts),
            "prompt_lengths": list(map(len, prompts)),
            "response_lengths": lengths.tolist(),
            "ended": int((ids[:, width:] == tokenizer.eos_token_id).any(1).sum()),
            "computed": ids[:, width:].numel(),
        }
        GATE.arrive(lambda given=given: given)
    GATE.leave()


def response_lengths(responses: torch.Tensor, eos: int) -> torch.Tensor:
    """[B] number of tokens up to and including the first EOS; all tokens if there is none."""
    ended = responses == eos
    return torch.where(ended.any(1), ended.int().argmax(1) + 1, responses.shape[1])


def real_rows(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """A padded batch as lists of real tokens."""
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def read_rows() -> list[dict[str, Any]]:
    with Path(TASK["data"]).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def digest(rows: list[list[int]]) -> str:
    """A digest of the rows that does not depend on their order."""
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
