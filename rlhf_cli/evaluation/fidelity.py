"""The cost of an export: held-out figures of the exported model beside the same figures of the original.

Both compute in float32, so the figures show the change of the weights alone. Computing in bfloat16 adds rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.comparison import wins
from rlhf_cli.algorithms.kl import kl_full
from rlhf_cli.config.ppo import Rollout
from rlhf_cli.data.answers import RankedIds
from rlhf_cli.data.cache import tokenise
from rlhf_cli.data.encode import Example
from rlhf_cli.data.encoders import PromptEncoder
from rlhf_cli.data.splits import Drawn
from rlhf_cli.data.stage_rows import ppo_rows
from rlhf_cli.evaluation.figures import difference_figure, mean_figure, ratio_figure, share_figure
from rlhf_cli.evaluation.likelihood import loss_difference, row_sums
from rlhf_cli.evaluation.reward_model import Scorer
from rlhf_cli.models.forward import budget_of_logits, positions, target_logits
from rlhf_cli.models.load import load_reward_model, load_tokenizer, prepare
from rlhf_cli.report.figure import Figure, Figures
from rlhf_cli.rollout.sampling import Response, draw_uniforms
from rlhf_cli.rollout.speaker import Speaker
from rlhf_cli.trained.run import Run

PROMPTS = 256  # held-out prompts that a language model responds to
PRECISION = "float32"


COLUMNS = ["", "original", "exported", "difference"]
Comparison = dict[str, Figures]
"""The figures of both models, and `difference`: exported minus original, and distances."""


def rows_of(found: Comparison) -> list[list[str]]:
    """The cells of a table: name, original, exported, difference. A distance has only the last."""
    rows = []
    for name, figure in found["difference"].items():
        sides = [str(found[side][name]) if name in found[side] else "" for side in COLUMNS[1:3]]
        # Differences may be far below one.
        interval = "" if math.isnan(figure.low) else f" [{figure.low:.2g}, {figure.high:.2g}]"
        rows.append([name.replace("_", " "), *sides, f"{figure.value:.2g}{interval}"])
    return rows


class PolicyCheck:
    """Loss on SFT's held-out rows, and exact KL on the original's responses to held-out prompts."""

    def __init__(self, run: Run, path: str):
        self.run = run
        self.model, self.tokenizer = run.load(path)
        self.rows = run.demonstrations(self.model, self.tokenizer)
        rollout, self.prompts = _prompts(run, self.model, self.tokenizer, self.rows)
        self.speaker = Speaker.of(rollout, self.model, self.tokenizer, PRECISION)
        about = [f"{self.rows} held-out rows"] * bool(self.rows)
        about += [f"responses to {len(self.prompts):,} held-out prompts"] * bool(self.prompts)
        self.about = ", ".join(about)

    def compare(self, exported: PreTrainedModel) -> Comparison:
        """Loss, and how far the next token's distribution is from the original's at each token of its responses."""
        prepare(exported, self.run.device)
        found, seed = Comparison(original={}, exported={}, difference={}), self.run.seed
        if self.rows:
            before, after = (
                row_sums(model, self.rows, self.run.budget(model, PRECISION), PRECISION)
                for model in (self.model, exported)
            )
            for side, sums in (("original", before), ("exported", after)):
                found[side]["loss"] = ratio_figure(sums.nll, sums.tokens, seed=seed)
            found["difference"]["loss"] = loss_difference(after, before, seed=seed)
        if self.prompts:
            both = [(prompt, response.ids) for prompt, response in zip(self.prompts, self.respond(), strict=True)]
            ids = [prompt + response for prompt, response in both]
            masks = [[False] * len(prompt) + [True] * len(response) for prompt, response in both]
            kl, other = token_distances(self.model, exported, ids, masks, self.run)
            tokens = torch.tensor([float(len(response)) for _, response in both])
            of_kl, of_other = (torch.stack([row.sum() for row in rows]) for rows in (kl, other))
            found["difference"] |= {
                "kl_per_token": ratio_figure(of_kl, tokens, seed=seed),
                "kl_of_the_worst_token": Figure(torch.cat(kl).max().item()),
                "other_likeliest_token": ratio_figure(of_other, tokens, seed=seed),
            }
        return found

    def respond(self) -> list[Response]:
        """The original's response to each prompt."""
        uniforms = draw_uniforms(self.run.seed, "export", 0, len(self.prompts), self.speaker.max_new_tokens)
        return self.speaker.respond(self.prompts, uniforms)


@torch.no_grad()
def token_distances(
    original: PreTrainedModel,
    exported: PreTrainedModel,
    ids: Sequence[list[int]],
    masks: Sequence[list[bool]],
    run: Run,
) -> tuple[list[Tensor], list[Tensor]]:
    """For the targets of each sequence: exact KL(original, exported) in nats, and 1 where the likeliest tokens differ.

    One [targets of the sequence] float64 tensor per sequence.
    """
    kl: dict[int, Tensor] = {}
    other: dict[int, Tensor] = {}
    budget = budget_of_logits(original, run.budget(original, PRECISION))
    for rows in budget.cut([len(row) for row in ids]):
        some = [ids[i] for i in rows], [masks[i] for i in rows]
        before, after = target_logits(original, *some)[0], target_logits(exported, *some)[0]  # [N, V] each
        lengths = [sum(masks[i]) for i in rows]
        is_other = (before.argmax(-1) != after.argmax(-1)).double().cpu()
        kl |= dict(zip(rows, kl_full(before, after).double().cpu().split(lengths), strict=True))
        other |= dict(zip(rows, is_other.split(lengths), strict=True))
    return [kl[i] for i in range(len(ids))], [other[i] for i in range(len(ids))]


def _prompts(
    run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Example]
) -> tuple[Rollout, list[list[int]]]:
    """The settings by which the run draws, and held-out prompts: of PPO, or of SFT's rows if PPO has not run."""
    rollout = run.rollout()
    room = positions(model) - rollout.max_new_tokens
    if run.ppo is not None:
        table = tokenise(PromptEncoder(tokenizer, ppo_rows(run.ppo)), longest=room).test
        return rollout, [row.ids for row in Drawn(table, PROMPTS, run.seed)]
    prompts = [row.ids[: row.loss_mask.index(True)] for row in Drawn(rows, PROMPTS, run.seed)]
    return rollout, [ids for ids in prompts if 0 < len(ids) <= room]


class RewardModelCheck:
    """Scores of the held-out answers, and which of two answers they prefer."""

    def __init__(self, run: Run, path: str):
        assert run.rm is not None
        self.run, self.config = run, run.rm.model_copy(update={"precision": PRECISION})
        self.model = load_reward_model(path)
        self.tokenizer = load_tokenizer(path)
        self.scorer = Scorer(run, self.config, self.model, self.tokenizer)
        self.rows = self.scorer.held_out_rows()
        kind = "pairs" if self.config.is_pairwise else "answers"
        self.about = f"{self.rows} held-out {kind}" if self.rows else ""

    def compare(self, exported: PreTrainedModel) -> Comparison:
        """The accuracy on pairs, and how far the scores moved."""
        found, seed = Comparison(original={}, exported={}, difference={}), self.run.seed
        pairs = [row for row in self.rows if isinstance(row, RankedIds)]
        before, after = (
            (scorer.score_ends(pairs) if pairs else scorer.score_items(self.rows)).double()
            for scorer in (self.scorer, Scorer(self.run, self.config, exported, self.tokenizer))
        )
        if pairs:
            right = [wins(score[0::2], score[1::2]) for score in (before, after)]
            found["original"]["accuracy"], found["exported"]["accuracy"] = map(share_figure, right)
            found["difference"]["accuracy"] = difference_figure(right[1], right[0], seed=seed)
            found["difference"]["other_preference"] = share_figure((right[0] != right[1]).double())
        scale = float(getattr(self.model.config, "score_std", None) or 1.0)
        moved = (after - before).abs() / scale
        found["difference"]["change_of_a_score"] = mean_figure(moved, seed=seed)
        found["difference"]["largest_change"] = Figure(moved.max().item())
        return found


Check = PolicyCheck | RewardModelCheck
"""A model of a run with its held-out rows, to compare an exported one with. `about` says what the figures are computed
on, "" without held-out rows. `compare` takes the exported model on the CPU, as it was loaded."""
