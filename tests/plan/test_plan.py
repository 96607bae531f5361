"""`rlhf plan`: peaks against recorded measurements, what fits, what makes it fit, and its errors."""

from __future__ import annotations

import importlib
import json
import re
import sys

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from rlhf_cli.cli import app
from support.paths import ROOT

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("plan_memory")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Folders with nothing but the config.json of Llama 3.1 8B and 70B."""
    folder = tmp_path_factory.mktemp("shapes")
    for name, size in SHAPES.items():
        config = LlamaConfig(
            **size, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, dtype="bfloat16"
        )
        config.save_pretrained(folder / name)
    return folder


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exit_code == code, result.output + result.stderr
    return result


def plan(*arguments):
    return json.loads(run(*arguments, "--json").stdout)["stages"]


def peaks_of(stage):
    """The peak with each of the changes that a plan offers."""
    return {" ".join(change["set"]): change["peak_bytes"] for change in stage["changes"]}


@pytest.fixture
def sft_8b(shapes):
    """A function: the GPUs, their memory and further options -> the options of the SFT of an 8B model."""

    def options(gpus, memory, *more):
        path = f"model.path={shapes / '8b'}"
        return ["configs/hh/sft.yaml", "--gpus", gpus, "--gpu-memory", memory, *sets(path, *more)]

    return options


OTHERS = pytest.param(("152k", "1M", "100M", "300M"), marks=pytest.mark.slow, id="others")


@pytest.fixture(scope="module", params=[pytest.param(("25M",), id="25M"), OTHERS])
def runs(request, benchmark, tmp_path_factory):
    """The recorded runs of some sizes of models, each with its plan: (case, row, plan)."""
    folder = tmp_path_factory.mktemp("runs")
    cases = [(benchmark.case_of(row), row) for row in benchmark.recorded()]
    return [(case, row, benchmark.planned(case, folder)) for case, row in cases if case.size in request.param]


def is_far(planned, measured):
    return not 0.85 <= planned / measured <= 1.15


def test_planned_peaks_are_within_15_percent_of_measured_ones(runs):
    kinds = {(case.kind, case.processes) for case, _, _ in runs}
    assert kinds >= {(kind, 1) for kind in ("float32", "bfloat16", "lora", "nf4")} | {("sharded", 2)}
    found = {case.name: (plan.peak.total, row["peak"]) for case, row, plan in runs}
    # At 1 million parameters the libraries' fixed part is half of the memory.
    far = {name: (p, m) for name, (p, m) in found.items() if is_far(p, m) and ("1M" not in name or abs(p - m) > 20e6)}
    assert far == {}


def test_each_planned_phase_is_within_15_percent_of_the_measured_one(runs):
    """Not of models whose weights are held in fewer bits: the pages of their files are in the measured memory, too.

    At 1 million parameters 25 MB are allowed: there saving is hardly more than the libraries' fixed part.
    Some phases are planned too low, and no peak is there: benchmarks/PLAN.md names them.
    """
    too_low = {"25M-rm-long-8bit-1: save"}
    too_low |= {f"152k-rm-float32-1: {phase}" for phase in ("normalisation", "save")}
    found, seen = {}, set()
    for case, row, plan in runs:
        measured = {} if case.kind in ("bfloat16", "nf4") else row.get("phases", {})
        for phase in plan.phases:
            if phase.name in measured:
                seen.add((case.kind, case.stage, phase.name))
                size = measured[phase.name]
                if is_far(phase.total, size) and (case.size != "1M" or abs(phase.total - size) >= 25e6):
                    found[f"{case.name}: {phase.name}"] = phase.total / size
    assert seen >= {("sharded", "ppo", "save"), ("float32", "ppo", "rollout"), ("float32", "rm", "normalisation")}
    assert seen >= {("lora", stage, "save") for stage in ("rm", "ppo")}
    assert found.keys() == {name for name in too_low if name.partition("-")[0] in {case.size for case, _, _ in runs}}, (
        found
    )
    assert min(found.values()) > 0.5


# ------------------------------------------------------------------------------------------ what fits


def test_an_8b_model_does_not_fit_a_24_gb_gpu_in_full_and_the_plan_says_what_does(sft_8b):
    (sft,) = plan(*sft_8b(1, "24GB"))
    assert not sft["fits"]
    # 16 bytes a weight before anything else.
    assert sft["peak_bytes"] > 16 * 8_030_261_248
    peaks = peaks_of(sft)
    assert (
        peaks["model.lora.quantize=nf4"] < peaks["model.lora.r=16"] < 0.9 * 24e9 < peaks["gradient_checkpointing=true"]
    )
    assert sft["enough"] == ["model.lora.r=16"]
    text = run(*sft_8b(1, "24GB")).stdout
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "does not fit in\n1 x 24 GB GPU" in text
    # The named change is enough. `auto` takes larger microbatches then.
    same = f"training.tokens_per_microbatch={sft['tokens_per_microbatch']}"
    for more in ([], [same]):
        (lora,) = plan(*sft_8b(1, "24GB", "model.lora.r=16", *more))
        assert lora["fits"]
    assert lora["peak_bytes"] == peaks["model.lora.r=16"]


def test_changes_are_compared_at_the_same_microbatches(sft_8b):
    """With `auto` the freed memory goes to larger microbatches, which would hide what a change saves."""
    (sft,) = plan(*sft_8b(1, "80GB"))
    peaks = peaks_of(sft)
    # 6.98 billion frozen linear weights in 4.5 bits instead of 16.
    saved = peaks["model.lora.r=16"] - peaks["model.lora.quantize=nf4"]
    assert saved == pytest.approx(6.98e9 * (2 - 4.5 / 8), rel=0.05)
    (lora,) = plan(*sft_8b(1, "80GB", "model.lora.r=16"))
    assert lora["tokens_per_microbatch"] > sft["tokens_per_microbatch"]
    # Weights, gradients and moments take 8 instead of 10 bytes a weight, and the passes need no 16-bit copies.
    states = [peaks[f"optimizer.precision={one}"] for one in ("8bit", "bfloat16")]
    assert states[0] - states[1] == pytest.approx(4 * 8.03e9, rel=0.05)


@pytest.mark.parametrize("amx", [False, True])
def test_weights_in_16_bits_are_offered_with_passes_in_16_bits(amx, shapes, monkeypatch):
    """The passes of `precision: auto` are in float32 on a CPU without AMX."""
    monkeypatch.setattr("rlhf_cli.plan.origins.has_amx", lambda: amx)
    (sft,) = plan("configs/hh/sft.yaml", "--set", f"model.path={shapes / '8b'}")
    (change,) = [change["set"] for change in sft["changes"] if "optimizer.precision=bfloat16" in change["set"]]
    assert change == [*["precision=bfloat16"] * (not amx), "optimizer.precision=bfloat16"]


def test_two_machines_may_share_within_each_or_among_all(sft_8b):
    peaks = peaks_of(plan(*sft_8b(16, "80GB"))[0])
    assert list(peaks).index("distributed.shard=hybrid") + 1 == list(peaks).index("distributed.shard=true")
    # 16 bytes a weight among 8 or 16 GPUs.
    saved = peaks["distributed.shard=hybrid"] - peaks["distributed.shard=true"]
    assert saved == pytest.approx(16 * 8.03e9 * (1 / 8 - 1 / 16), rel=0.1)


def sets(*overrides):
    return [word for text in overrides for word in ("--set", text)]


@pytest.fixture
def parts(shapes):
    """A function: GPUs, overrides of the PPO of an 8B model -> the parts of its phases, by name."""

    def of(gpus, *overrides):
        machine = ["--gpus", gpus, "--gpu-memory", "640GB", "--set", f"sft:model.path={shapes / '8b'}"]
        return phases_of(plan("configs/hh", *machine, *sets(*overrides))[2])

    return of


def phases_of(stage):
    return {phase["name"]: phase["parts"] for phase in stage["phases"]}


OFFLOAD = "ppo:offload=[optimizer, frozen]"


def test_offloading_counts_the_optimizer_in_updates_and_frozen_models_in_scoring(parts):
    before, after = parts(1), parts(1, OFFLOAD)
    for phase in ("rollout", "scoring", "update"):
        assert bool(after[phase].get("optimizer")) == (phase == "update")
        assert bool(after[phase].get("frozen models")) == (phase == "scoring")
    frozen = after["scoring"]["frozen models"]
    assert before["update"]["weights"] == pytest.approx(after["update"]["weights"] + frozen)
    saved = sum(before["rollout"].values()) - sum(after["rollout"].values())
    assert saved == pytest.approx(before["rollout"]["optimizer"] + frozen)
    in_loss = parts(1, OFFLOAD, "ppo:ppo.kl_in=loss", "ppo:ppo.kl_estimator=full")["update"]
    assert in_loss["frozen models"] > 2 * 2 * 7.5e9, "reference and reward model, for the full KL of the update"


@pytest.mark.parametrize(("rows", "copy"), [(1, 4), (4096, 2)])
def test_the_copy_of_a_sharded_policy_is_in_float32_while_it_is_compared(parts, rows, copy):
    """With many responses their keys and values need more than that."""
    sizes = [f"ppo:ppo.{key}=32768" for key in ("rollout_batch_size", "minibatch_size")]
    found = parts(8, "distributed.shard=true", f"ppo:rollout.max_live_rows={rows}", *sizes)["rollout"]
    assert found["rollout copy"] == pytest.approx(copy * 8.03e9, rel=0.01)
    assert ("keys and values" in found) == (rows > 1)


def test_a_gpu_holds_a_copy_of_float32_weights_in_16_bits_while_it_samples(parts):
    assert parts(1)["rollout"]["rollout copy"] == pytest.approx(2 * 7.5e9, rel=0.01), "all but the embeddings"
    for override in ("ppo:precision=float32", "ppo:optimizer.precision=bfloat16"):
        assert "rollout copy" not in parts(1, override)["rollout"]


def test_every_phase_holds_the_moving_average_or_its_share():
    ema, shard = "ppo:ppo.ema_decay=0.9", "ppo:distributed.shard=true"
    without, averaged, sharded = (
        phases_of(plan("configs/support", "--nproc", 2, *sets(*more))[2]) for more in ([], [ema], [ema, shard])
    )
    assert sharded["update"]["moving average"] == averaged["update"]["moving average"] / 2
    for phase in ("rollout", "scoring", "update"):
        assert not without[phase].get("moving average")
        assert averaged[phase]["moving average"] == averaged["update"]["moving average"] > 1e6


def test_a_reward_model_of_adapters_shares_the_weights_of_the_policy_unless_it_is_sharded():
    options = ["--nproc", 2, *sets("rm:model.lora.save=adapter", "ppo:policy.lora.r=16")]
    sizes = []
    for more in ([], ["distributed.shard=true"]):
        models = plan("configs/support", *options, *sets(*more))[2]["models"]
        (reward,) = [model for model in models if model["name"] == "reward model"]
        sizes.append(reward["weight_bytes"])
    assert sizes[0] == 0 < sizes[1]


@pytest.mark.parametrize("section", ["policy", "ref_policy", "value_model", "rewards"])
def test_a_model_that_is_kept_whole_is_planned_with_all_of_its_weights(section):
    names = {"ref_policy": "reference policy", "value_model": "value model", "rewards": "reward model"}
    shard = "ppo:distributed.shard=true"
    halves, kept = (
        {
            model["name"]: model["weight_bytes"]
            for model in plan("configs/support", "--nproc", 2, *sets(*more))[2]["models"]
        }
        for more in ([shard], [shard, f"ppo:distributed.keep_whole=[{section}]"])
    )
    whole = names.get(section, section)
    assert kept == {name: size * (2 if name == whole else 1) for name, size in halves.items()}


def test_a_value_model_of_its_own_path_is_planned_with_its_own_size(shapes):
    texts = [f"value_model.path={shapes / '8b'}", "policy.lora.r=16", "value_model.lora.r=16"]
    texts.append("rewards=[{type: length, target: 10}]")
    models = plan("configs/support", *sets(*(f"ppo:{text}" for text in texts)))[2]["models"]
    (value,) = [model for model in models if model["name"] == "value model"]
    assert value["parameters"] > 7e9
    assert value["weight_bytes"] == pytest.approx(4 * value["parameters"], rel=0.01), "no weights of the policy"


def test_threads_need_memory_and_do_not_change_the_microbatches():
    one, four = (plan("configs/support", "--set", f"threads={n}")[2] for n in (1, 4))
    assert one["tokens_per_microbatch"] == four["tokens_per_microbatch"]
    parts = [phases_of(stage) for stage in (one, four)]
    assert "other threads" not in parts[0]["update"]
    of_pass = parts[0]["update"]["activations"] + parts[0]["update"].get("logits", 0)
    gradients = max(model["gradient_bytes"] for model in four["models"])
    assert parts[1]["update"]["other threads"] == pytest.approx(3 * of_pass + 5 * gradients)
    assert 0 < parts[1]["scoring"]["other threads"] < 3 * of_pass
    assert "other threads" not in parts[1]["rollout"]


def test_a_model_that_is_offloaded_needs_the_memory_of_the_cpu_and_not_of_the_gpu(sft_8b):
    """The plan offers it where the parts of the model do not fit, and counts what it moves."""
    (sft,) = plan(*sft_8b(4, "24GB"))
    assert sft["enough"] == ["distributed.shard=true", "distributed.offload=true"]
    (sharded,) = plan(*sft_8b(4, "24GB", "distributed.shard=true"))
    options = sft_8b(4, "24GB", *sft["enough"])
    (offloaded,) = plan(*options)
    assert (sharded["fits"], offloaded["fits"], sharded["offloaded_bytes"]) == (False, True, 0)
    # 16 bytes a weight, a quarter of them for each process.
    assert offloaded["offloaded_bytes"] == pytest.approx(16 * 8_030_261_248 / 4)
    assert not any(phase["parts"].get(kind) for phase in offloaded["phases"] for kind in ("weights", "optimizer"))
    assert "CPU memory: 32.1 GB for each process" in run(*options).stdout


def test_several_changes_together_make_a_run_fit(sft_8b):
    (sft,) = plan(*sft_8b(1, "9GB"))
    assert len(sft["enough"]) > 1
    assert plan(*sft_8b(1, "9GB", *sft["enough"]))[0]["fits"]


RECIPES = {
    "hh-8b-qlora": ("8b", 1, "24GB"),
    "hh-8b-lora": ("8b", 1, "24GB"),
    "hh-8b": ("8b", 8, "80GB"),
    "hh-70b": ("70b", 64, "80GB"),
    "hh-70b-full": ("70b", 64, "80GB"),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_fits_the_machine_that_it_is_for(shapes, recipe):
    size, gpus, memory = RECIPES[recipe]
    text = (ROOT / f"configs/{recipe}/sft.yaml").read_text(encoding="utf-8")
    assert f"rlhf plan configs/{recipe} --gpus {gpus} --gpu-memory {memory} --rows 160800" in text
    machine = ["--gpus", gpus, "--gpu-memory", memory, "--set", f"sft:model.path={shapes / size}"]
    for stage in plan(f"configs/{recipe}", *machine):
        assert stage["fits"], stage["stage"]
        # Not by a wide margin: the recipe uses the machine, and a smaller one would not do for all of its stages.
        assert stage["peak_bytes"] > 7e9
        if stage["stage"] == "rm":
            # At 70 B the SFT model does not fit unless it is sharded.
            assert (stage["phases"][0]["name"] == "normalisation") == (recipe != "hh-70b")


LARGER = [pytest.param(name, marks=pytest.mark.slow) for name in ("smollm2-360m", "qwen3-0.6b")]


@pytest.mark.parametrize("name", ["smollm2-135m", "pythia-160m", *LARGER])
def test_each_small_recipe_fits_a_laptop_of_16_gb_and_8_cores(name, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    small_models = importlib.import_module("small_models")
    small_models.config_of(name).save_pretrained(tmp_path)
    stages = plan(f"configs/{name}", "--set", f"sft:model.path={tmp_path}", "--set", "threads=8")
    policy = next(model for model in stages[2]["models"] if model["name"] == "policy")
    assert policy["parameters"] - policy["trained"] in (0, small_models.SHAPES[name][1])  # LoRA adds to them.
    for stage in stages:
        assert 5e9 < stage["peak_bytes"] <= 0.9 * 16e9, stage["stage"]


def test_a_shipped_run_fits_this_machine_and_shows_its_length():
    text = run("configs/support").stdout
    assert text.count("fits in") == 3
    assert "520 optimizer steps, at most 1,597,440 tokens" in text
    trained = {model["name"]: model["trained"] > 0 for model in plan("configs/support")[2]["models"]}
    assert trained == {"policy": True, "value model": True, "reference policy": False, "reward model": False}
    assert re.search(r"^  update +[\d.]+ MB  .*activations", text, re.MULTILINE)


def test_an_override_without_a_prefix_is_for_the_stages_that_are_planned():
    (rm,) = plan("configs/support/rm.yaml", "--set", "loss=logexp")  # a key that the sft.yaml beside it cannot have
    assert rm["fits"]


# --------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((f"configs/support --gpu-memory {size}", f"found {size}, must be a size") for size in ("much", "0GB", "80")),
        ("configs/support --gpu-memory 80GB/2", "--gpu-memory: found 80GB/2, must be a size such as 80GB or 24GiB"),
        ("configs/support --gpus 2 --gpu-memory 80GB --nproc 7", "--nproc: has no effect beside --gpus, which"),
        ("configs/support --gpu-memory 80GB --nproc 7", "--nproc: has no effect beside --gpu-memory"),
        (
            "configs/support/sft.yaml --gpu-memory 24GB --set device=cpu",
            "device: cpu, but the plan is for 1 x 24 GB GPU. Set device: auto, or plan for another machine",
        ),
        (
            "configs/support/sft.yaml --set optimizer.precision=bfloat16",
            "optimizer.precision: bfloat16 needs bfloat16 passes, and precision: auto is float32 on this cpu",
        ),
        ("--config missing/sft.yaml", "missing/sft.yaml: no such file"),
        ("configs", "configs: has no sft.yaml, rm.yaml or ppo.yaml"),
        ("configs/stories --set rm:seed=1", "configs/stories has no rm.yaml that is read here, so this would"),
        ("configs/support --stage rm", "--stage: is for a file whose name does not tell. For one stage of configs/"),
        ("", "give one config: rlhf plan FILE, or rlhf plan --config FILE"),
        (
            "configs/support/sft.yaml --set model.scratch=null --set model.path=nobody/nothing",
            "model.path: nobody/nothing is no directory, and its config.json is not in the hub's cache. Download it: "
            "hf download nobody/nothing config.json",
        ),
        (
            "configs/stories/ppo.yaml --set policy.path=data/stories/babyllama",
            "policy.path: data/stories/babyllama: no such directory. Run the stage or command that writes it, or give",
        ),
        (
            "configs/support/sft.yaml --set model.scratch.config.num_attention_heads=0",
            "model.scratch: cannot build this model (",
        ),
    ],
)
def test_errors_are_one_line_and_exit_code_2(line, message):
    result = run(*line.split(), code=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_stage_without_its_earlier_stage_is_an_error(tmp_path):
    config = (ROOT / "configs/support/rm.yaml").read_text().replace("artifacts/support", str(tmp_path / "run"))
    (tmp_path / "rm.yaml").write_text(config)
    result = run(tmp_path / "rm.yaml", code=2)
    assert "model.path: is the model of this run's sft stage, and there is neither a sft.yaml beside" in result.stderr
