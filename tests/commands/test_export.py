"""`rlhf export`: what it writes, that others can read it, what it says that it cost, and that nothing half written
remains.
"""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands.push import collect
from rlhf_cli.config.models import Lora
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.data.records import Message
from rlhf_cli.errors import ArtifactError
from rlhf_cli.evaluation.fidelity import PolicyCheck, RewardModelCheck, rows_of, token_distances
from rlhf_cli.models.adapter_files import BaseModel
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.gguf import pre_tokenizer
from rlhf_cli.models.load import load_policy, load_reward_model, load_tokenizer, prepare
from rlhf_cli.models.save import save_trained
from rlhf_cli.trained.run import open_run
from support.compare import close_in_size as close
from support.compare import logits_of as logits
from support.projects import largest_file, refused, rlhf
from support.speaking import speaker_at
from support.tiny import CPU, random_ids


@pytest.fixture(scope="module")
def lora_run(run_stage, make_model, tmp_path_factory):
    """An SFT stage saved merged and a reward model saved as adapters, with learning rates that change something."""
    root = tmp_path_factory.mktemp("lora_run")
    fast = {"optimizer": {"learning_rate": 3e-2}}
    run_stage("sft", root, model={"path": str(make_model("llama")), "lora": {"r": 2}}, **fast)
    base = {"path": str(make_model("llama")), "lora": {"r": 2, "save": "adapter"}}
    run_stage("rm", root, model=base, **fast)
    return root


def done(directory, out, *options):
    """The content of export.json."""
    rlhf("export", directory, "--out", out, *options)
    return json.loads((out / "export.json").read_text())


# ------------------------------------------------------------------------------------------- weights and figures


def test_an_export_in_float32_is_the_model_itself_and_costs_nothing(run, tmp_path):
    facts = done(run, tmp_path / "out", "--max-shard-size", "40KB")
    assert (facts["model"], facts["stage"], facts["written_as"]) == (f"{run.name}-ppo", "ppo", "float32")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    difference = facts["difference"]
    assert difference["kl_per_token"]["value"] == difference["loss"]["value"] == 0.0
    assert facts["original"] == facts["exported"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(plain), logits(AutoModelForCausalLM.from_pretrained(run / "ppo" / "model")))
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "out" / "README.md").stat().st_mode & 0o777}, "a server of another user reads all"
    assert "## Export" in (tmp_path / "out" / "README.md").read_text()
    assert not list(tmp_path.glob(".out*"))


def test_an_export_and_an_upload_are_prompted_with_the_transcripts_of_the_run(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for stage in ("sft", "ppo"):
        (copy / stage / "samples.jsonl").write_text(json.dumps({"prompt": "Human: the tent\n\nAssistant:"}) + "\n")
    messages = [Message("user", "the tent"), Message("assistant", "is late"), Message("user", "the lamp")]
    trained = speaker_at(copy, "sft")
    assert trained.form.kind == "transcript"
    facts = done(copy, tmp_path / "out", "--stage", "sft", "--no-check")
    assert facts["prompts"] == 'turns as in training, "Human: ...\\n\\nAssistant:"'
    exported = speaker_at(tmp_path / "out")
    wanted = trained.form.encode(trained.tokenizer, messages)
    assert exported.form.encode(exported.tokenizer, messages) == wanted
    turns = [{"role": m.role, "content": m.content} for m in messages]
    assert load_tokenizer(str(tmp_path / "out")).apply_chat_template(turns, return_dict=False) == wanted
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"## How it is prompted\n\nPrompts: {facts['prompts']}. The chat template" in card
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")),
        logits(AutoModelForCausalLM.from_pretrained(run / "sft" / "model")),
    )
    upload = collect(str(copy), "sft")
    assert upload.contents["chat_template.jinja"] == (tmp_path / "out" / "chat_template.jinja").read_bytes()
    assert f"Prompts: {facts['prompts']}." in upload.contents["README.md"].decode()
    assert "chat_template.jinja" not in {path.name for path in (copy / "sft" / "model").iterdir()}


def test_a_run_that_began_in_bfloat16_ends_in_bfloat16(run_stage, make_model, tmp_path):
    """Its weights are those of the artifact, rounded once, and the figures are those of exactly these weights."""
    base = AutoModelForCausalLM.from_pretrained(make_model("llama"), dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    load_tokenizer(str(make_model("llama"))).save_pretrained(tmp_path / "base")
    stage = run_stage("sft", tmp_path / "run", model={"path": str(tmp_path / "base")}, save_dtype="float32")
    facts = done(tmp_path / "run", tmp_path / "out")
    assert facts["dtype"] == AutoConfig.from_pretrained(tmp_path / "out").to_dict()["dtype"] == "bfloat16"
    weights, before = load_file(tmp_path / "out/model.safetensors"), load_file(stage / "model/model.safetensors")
    assert {name: weight.dtype for name, weight in weights.items()} == dict.fromkeys(weights, torch.bfloat16)
    assert all(torch.equal(weights[name], before[name].to(torch.bfloat16)) for name in before)

    check = PolicyCheck(open_run(tmp_path / "run", stage=None, device=CPU, seed=0), str(stage / "model"))
    ids = [prompt + response.ids for prompt, response in zip(check.prompts, check.respond(), strict=True)]
    starts = [len(prompt) for prompt in check.prompts]
    models = [load_policy(str(path)).double() for path in (stage / "model", tmp_path / "out")]
    total = sum(kl_by_hand(*models, row, start).sum().item() for row, start in zip(ids, starts, strict=True))
    kl = facts["difference"]["kl_per_token"]
    assert kl["value"] == pytest.approx(total / sum(len(i) - n for i, n in zip(ids, starts, strict=True)), rel=0.05)
    assert kl["low"] <= kl["value"] <= kl["high"]
    original, exported, difference = (facts[side]["loss"]["value"] for side in ("original", "exported", "difference"))
    assert difference == pytest.approx(exported - original, rel=1e-3)
    assert 0 < kl["value"] < facts["difference"]["kl_of_the_worst_token"]["value"]


@torch.no_grad()
def kl_by_hand(original, exported, ids, start):
    """KL(original, exported) of the token after each of ids[start - 1], ..., ids[-2], in float64, one sequence."""
    p, q = (
        model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1) for model in (original, exported)
    )
    return (p.exp() * (p - q)).sum(-1)


def test_distances_of_tokens_equal_those_of_one_sequence_at_a_time(make_model, run):
    models = [load_policy(str(make_model("llama"))) for _ in range(2)]
    with torch.no_grad():
        for weight in models[1].parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    ids, starts = random_ids(9, 23, 4), [3, 1, 2]
    masks = [[i >= start for i in range(len(row))] for row, start in zip(ids, starts, strict=True)]
    expected = [kl_by_hand(*models, row, start) for row, start in zip(ids, starts, strict=True)]
    for model in models:
        prepare(model, CPU)
    kl, other = token_distances(*models, ids, masks, open_run(run, stage=None, device=CPU, seed=0))
    for a, b, differs in zip(kl, expected, other, strict=True):
        close(a, b.double())
        assert a.min() > 0
        assert set(differs.tolist()) <= {0.0, 1.0}
    assert 0 < torch.cat(other).mean() < 1


def test_a_reward_model_keeps_what_belongs_to_its_head(run, tmp_path):
    facts = done(run / "rm", tmp_path / "out", "--dtype", "bfloat16")
    assert set(facts["original"]) == {"accuracy"}
    assert 0 < facts["difference"]["change_of_a_score"]["value"] < facts["difference"]["largest_change"]["value"] < 0.2
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (run / "rm" / "model", tmp_path / "out")
    )
    assert after.pop("dtype") == "bfloat16"
    assert {key: value for key, value in before.items() if key != "dtype"} == after
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    original = AutoModelForSequenceClassification.from_pretrained(run / "rm" / "model")
    assert (logits(model) - logits(original)).abs().max() < 0.1
    assert model.config.score_std == original.config.score_std


def test_the_figures_of_a_reward_model_are_those_of_its_side(run):
    """With its head turned round a model prefers the other answer of every pair."""
    check = RewardModelCheck(open_run(run, stage=None, device=CPU, seed=0), str(run / "rm" / "model"))
    turned = load_reward_model(str(run / "rm" / "model"))
    with torch.no_grad():
        turned.score.weight.neg_()
    found = check.compare(turned)
    accuracy = json.loads((run / "rm" / "manifest.json").read_text())["metrics"]["eval/accuracy"]
    values = [found[side]["accuracy"].value for side in ("original", "exported", "difference")]
    assert values == pytest.approx([accuracy, 1 - accuracy, 1 - 2 * accuracy])
    assert found["difference"]["other_preference"].value == 1
    assert rows_of(found)[0][:3] == ["accuracy", str(found["original"]["accuracy"]), str(found["exported"]["accuracy"])]


def test_adapters_are_exported_merged_and_alone_however_they_were_saved(lora_run, tmp_path):
    for stage, auto in (("sft", AutoModelForCausalLM), ("rm", AutoModelForSequenceClassification)):
        labels = {"num_labels": 1} if stage == "rm" else {}
        whole, alone = tmp_path / f"{stage}-whole", tmp_path / f"{stage}-alone"
        done(lora_run, whole, "--stage", stage)
        facts = done(lora_run, alone, "--stage", stage, "--format", "adapter")
        figures = facts["difference"]["largest_change" if stage == "rm" else "kl_per_token"]
        assert abs(figures["value"]) < 1e-5
        assert not (alone / "config.json").exists()
        for folder, library in ((whole, "transformers"), (alone, "peft")):
            assert f"library_name: {library}\n" in (folder / "README.md").read_text()
        expected = logits(auto.from_pretrained(lora_run / stage / "model", **labels))
        close(logits(auto.from_pretrained(whole)), expected)
        close(logits(auto.from_pretrained(alone, **labels)), expected)
        assert load_tokenizer(str(alone)).get_vocab() == load_tokenizer(str(whole)).get_vocab()
    # What rlhf itself reads: the base is found, and belongs to these adapters.
    close(logits(load_policy(str(tmp_path / "sft-alone"))), logits(load_policy(str(tmp_path / "sft-whole"))))
    about = json.loads((tmp_path / "sft-alone" / "base_model.json").read_text())
    assert (tmp_path / "sft-alone" / about["relative_path"]).resolve() == Path(about["path"])


def test_a_model_of_no_run_is_exported_without_figures(make_model, tmp_path):
    facts = done(make_model("gpt2"), tmp_path / "out", "--dtype", "float16")
    assert "difference" not in facts
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    close(logits(plain), logits(load_policy(str(make_model("gpt2"))).half().float()))


def test_no_check_reads_no_data(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    for config in copy.glob("*/config.yaml"):
        config.write_text(config.read_text().replace(".jsonl", ".gone"))
    error = rlhf("export", copy, "--out", tmp_path / "out", code=2).stderr
    assert "no such file" in error
    assert error.endswith("Or export without figures: --no-check\n")
    assert "difference" not in done(copy, tmp_path / "out", "--no-check")


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stage", "rm", "--format", "adapter"], "was trained without LoRA"),
        (["--format", "adapter", "--quantize", "int8"], "adapters are not quantized"),
        (["--quantize", "q8_0"], "Add --format gguf, or give int8"),
        (["--format", "gguf", "--quantize", "int8"], "For GGUF give q8_0"),
        (["--format", "gguf", "--quantize", "q8_0", "--dtype", "float16"], "--dtype: does nothing with --quantize"),
        (["--max-shard-size", "much"], "--max-shard-size: much, must be a size such as 500MB"),
        (["--format", "gguf", "--max-shard-size", "1GB"], "--max-shard-size: does nothing with --format gguf"),
        (["--quantize", "int8"], "needs the package torchao (extra torchao)"),
        (["--format", "gguf"], "convert_hf_to_gguf.py of llama.cpp is not on the PATH"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(run, tmp_path, monkeypatch, options, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert message in refused("export", run, "--out", tmp_path / "out", *options)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_or_stage_that_cannot_be_exported_is_named(run, make_model, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "ppo")
    cases = [
        (copy, ["--stage", "ppo"], "stage ppo is not finished"),
        (make_model("llama"), ["--stage", "sft"], "is a model and not a run"),
        (tmp_path / "none" / "there", [], "no such directory"),
        (tmp_path / "none" / "there", ["--format", "adapter"], "no such directory"),
    ]
    for directory, options, message in cases:
        assert message in refused("export", directory, "--out", tmp_path / "out", *options)
    (copy / "sft" / "model" / "model.safetensors").write_bytes(b"")
    assert "was modified after the stage was finished" in rlhf("export", copy, "--out", tmp_path / "out", code=2).stderr
    (tmp_path / "out").mkdir()
    assert "exists, and is not overwritten" in refused("export", run, "--out", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_weight_beyond_float16_is_refused(make_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_model("llama"))
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    model.save_pretrained(tmp_path / "large")
    load_tokenizer(str(make_model("llama"))).save_pretrained(tmp_path / "large")
    error = rlhf("export", tmp_path / "large", "--out", tmp_path / "out", "--dtype", "float16", code=2).stderr
    assert "weight model.norm.weight" in error
    assert "too large for float16" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("writes", ["rlhf_cli.models.save.save_file", "rlhf_cli.commands.export._card"])
def test_a_full_disk_gets_one_line_and_leaves_nothing(run, tmp_path, monkeypatch, writes):
    """In the middle of the weights, and in the last file."""

    def full(*arguments, **_):
        for path in arguments:
            if isinstance(path, str | Path):
                Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writes, full)
        line = refused("export", run, "--out", tmp_path / "out", "--no-check")
    assert "cannot be written" in line
    assert "No space left on device" in line
    assert list(tmp_path.iterdir()) == []
    done(run, tmp_path / "out", "--no-check")


def test_a_full_disk_under_the_adapters_or_the_tokenizer_is_one_line(lora_run, make_model, tmp_path):
    """safetensors and tokenizers have errors of their own for it."""
    with largest_file(4000):
        line = refused(
            "export", lora_run, "--stage", "sft", "--format", "adapter", "--out", tmp_path / "out", "--no-check"
        )
    assert "out: cannot be written" in line
    base, lora = str(make_model("llama")), Lora(r=1, target_modules=["q_proj"], save="adapter")
    model, tokenizer = load_policy(base), load_tokenizer(base)
    add_lora(model, lora, "lora", seed=0)
    with largest_file(8000), pytest.raises(ArtifactError, match=r"adapter: cannot be written .*os error"):
        save_trained(model, tokenizer, tmp_path / "adapter", SFTConfig.model_construct(), lora, BaseModel(base))
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file(), "it failed at the tokenizer"


# ------------------------------------------------------------------------------------------- llama.cpp

CONVERTER = """#!/usr/bin/env python3
import json, sys
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
def main():
    if REFUSES:
        raise NotImplementedError("no such architecture")
    name = TextModel().get_vocab_base_pre(None)
    open(sys.argv[sys.argv.index("--outfile") + 1], "w").write(json.dumps([name, sys.path[0], *sys.argv[1:]]))
"""


@pytest.fixture
def llama_cpp(tmp_path, monkeypatch):
    """A function: put a converter on the PATH that writes its arguments, or refuses every model."""

    def install(*, refuses=False):
        folder = tmp_path / "llama.cpp"
        folder.mkdir(exist_ok=True)
        script = folder / "convert_hf_to_gguf.py"
        script.write_text(CONVERTER.replace("REFUSES", str(refuses)))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
        return folder

    return install


def test_the_converter_of_llama_cpp_gets_the_model_and_the_name_of_its_pre_tokenizer(run, tmp_path, llama_cpp):
    folder = llama_cpp()
    facts = done(run, tmp_path / "out", "--format", "gguf", "--dtype", "bfloat16", "--no-check")
    assert facts["written_as"] == "GGUF bfloat16"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "export.json",
        f"{run.name}-ppo-BF16.gguf",
    ]
    name, path, source, *options = json.loads((tmp_path / "out" / f"{run.name}-ppo-BF16.gguf").read_text())
    assert (name, path) == ("smollm", str(folder))
    assert not Path(source).exists(), "the intermediate model is removed"
    assert options[2:] == ["--outtype", "bf16", "--model-name", f"{run.name}-ppo"]
    llama_cpp(refuses=True)
    result = rlhf("export", run, "--out", tmp_path / "other", "--format", "gguf", "--no-check", code=2)
    assert "of llama.cpp failed (NotImplementedError: no such architecture)" in result.stderr
    assert not (tmp_path / "other").exists()


def test_pre_tokenizers_that_llama_cpp_has_are_named(tokenizer, eos_only_tokenizer, word_piece):
    assert pre_tokenizer(tokenizer) == "smollm"
    assert pre_tokenizer(eos_only_tokenizer) == "gpt-2"
    assert pre_tokenizer(word_piece) is None


def test_remote_code_and_adapters_without_their_base_are_one_line(make_model, tmp_path):
    own = Path(shutil.copytree(make_model("llama"), tmp_path / "own"))
    config = {**json.loads((own / "config.json").read_text()), "model_type": "mine"}
    (own / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "code.Config"}}))
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    save_file({"a.lora_A.weight": torch.zeros(1)}, adapters / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "base_model_name_or_path": "nobody/nothing", "r": 2, "target_modules": ["q_proj"]}
    (adapters / "adapter_config.json").write_text(json.dumps(values))
    for model, says in ((own, "code that comes with a model is never run"), (adapters, "nobody/nothing")):
        result = CliRunner().invoke(app, ["export", str(model), "--out", str(tmp_path / "out")])
        assert result.exit_code in (1, 2), result.exception
        error = result.stderr.splitlines()[-1]
        assert error.startswith("error: "), result.exception
        assert says in error
        assert "disk space" not in error
        assert not (tmp_path / "out").exists()
