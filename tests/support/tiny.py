"""Tiny models, tiny data, and helpers to write and read them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.data.encode import Example
from rlhf_cli.data.encoders import DemonstrationEncoder
from rlhf_cli.data.formats import Purpose, read_record, recognise
from rlhf_cli.data.records import Record, Row
from rlhf_cli.data.stage_rows import StageRows
from rlhf_cli.models.load import prepare, set_dropout_off

ARCHITECTURES = ("llama", "gpt2", "qwen2", "gpt_neox")
BART_PARTS = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_SIZES |= {"max_position_embeddings": 128, "initializer_range": 0.2}
_LLAMA_LIKE = {**_SIZES, "num_key_value_heads": 2}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    # The configs keep dropout, so that tests detect code that does not turn it off.
    "gpt2": {**_GPT, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_neox": {**_SIZES, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2, "hidden_dropout": 0.1},
    "gemma2": {**_LLAMA_LIKE, "head_dim": 8, "sliding_window": 6},
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"ffn_dim": 48, "max_position_embeddings": 128, "init_std": 0.2, "dropout": 0.1},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "bart": {"d_model": 32, "max_position_embeddings": 128, "init_std": 0.2, "dropout": 0.1}
    | {f"{side}_{part}": n for side in ("encoder", "decoder") for part, n in BART_PARTS.items()},
    "mixtral": {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "jamba": {**_LLAMA_LIKE, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}
    | {"use_mamba_kernels": False},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.2},
    "codegen": {**_GPT, "rotary_dim": 4, "n_inner": 48},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "intermediate_size": 48}
    | {"context_length": 128},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "initializer_range": 0.2},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "initializer_range": 0.2},
}


def tiny_model(family: str, auto: Any = AutoModelForCausalLM, **config: Any) -> Any:
    """A random model with the sizes of SETTINGS, other families with those of Llama, in eval mode without dropout."""
    special = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings = special | SETTINGS.get(family, _LLAMA_LIKE) | config
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32).eval()
    set_dropout_off(model)
    return model


def llama(auto: Any = AutoModelForCausalLM, **config: Any) -> Any:
    """A prepared Llama with sizes that differ, of three layers."""
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "vocab_size": 500, "num_labels": 1}
    model = tiny_model("llama", auto, **sizes | config)
    assert prepare(model, CPU) is None
    return model


TEXT = "the tent lamp radio map is late broken please help thank you we will send a new one today sorry"
WORDS = TEXT.split()
GOOD, BAD = "thank", "sorry"  # every chosen answer contains GOOD, every rejected one BAD


def character_tokenizer(tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each character. The first of the tokens is EOS."""
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), tokens[0])
    return PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False, **special)


def metaspace(texts: list[str], scheme: str, **more: Any) -> PreTrainedTokenizerFast:
    """Like Llama 2's: a blank goes before the first or always before a text."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    bpe.decoder = decoders.Metaspace(prepend_scheme=scheme)
    alphabet = sorted({*"".join(texts), *"<>/sINT[]|"})
    parts: dict[str, Any] = {"special_tokens": ["<unk>", "<s>", "</s>"], "initial_alphabet": alphabet}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, show_progress=False, **parts))
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **named, **more)


def sentence(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS[:10]) for _ in range(rng.randint(low, high)))


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    # Not splitlines: a text may contain U+0085 or U+2028.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` updated by `changes`, mapping by mapping. A value of None sets the key to null."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def encoder(folder, tokenizer, num_labels=1, **settings):
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        dim=32,
        n_layers=1,
        n_heads=4,
        hidden_dim=48,
        max_position_embeddings=128,
        num_labels=num_labels,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
        **settings,
    )
    model = DistilBertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


CPU = torch.device("cpu")
VOCAB = 256  # smaller than that of every fixture model
EOS_OF = {"gpt2": 0}  # the others have 2


def random_ids(*lengths, seed=0):
    """Sequences of ids from 3 to VOCAB - 1, without special tokens."""
    draw_from = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=draw_from).tolist() for n in lengths]


def double(model):
    model = copy.deepcopy(model).double()
    model.zero_grad()
    return model


PROMPTS = random_ids(1, 5, 12, 5, 2, 9, 3, 7, seed=5)
STOP = frozenset(range(10, 60))  # about one token in six ends a response
LONGEST = 14


def training_examples(
    tokenizer: Any, rows: Sequence[Any], template: str | None = None, *, learn_all: bool = False
) -> list[Example]:
    """Demonstrations as SFT trains on them, without a limit of their length."""
    spec = StageRows(Rows.model_validate({"train": "x"}), "sft", template=template, learn_all=learn_all)
    found = list(DemonstrationEncoder(tokenizer, spec).encode(rows))
    assert all(isinstance(example, Example) for example in found)
    return found  # type: ignore[return-value]


def seen_of(values: dict[str, Any], purpose: Purpose) -> Record:
    """A row as a stage sees it."""
    source, row = DataSource(path="x"), Row(values, "file:1")
    record = read_record(row, recognise(row, source, purpose), source)
    seen = StageRows(Rows(train=[source]), purpose).view(record, "train")
    assert isinstance(seen, Record)
    return seen
