"""Rollout engines in this process: the program's own decoder on a copy of the weights, healthy and deliberately stale.

`fake_vllm` has the part of vLLM's interface that rlhf calls, with its order of calls.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import torch
from transformers import AutoConfig

from rlhf_cli.models.save import plain_weights
from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.engine import checksum
from rlhf_cli.rollout.sampling import sample
from rlhf_cli.seeding import generator
from support.compare import merged_copy


def weights_of(policy):
    return {name: read().clone() for name, (_, read) in plain_weights(policy).items()}


class CopyEngine:
    """Samples from its own copy of the policy, in its own type, with an untied head as an engine may have.

    `kept`: a function of a weight's name; weights for which it is True are never taken over after the start. `late`:
    takes over the weights of the transfer before. `permuted`: rows of embedding and head are in another order.
    `forgets`: sleeping drops the weights. `is_readable`: gives checksums. `temperature`: a setting that it gets wrong.
    """

    name = "copy"

    def __init__(
        self,
        policy,
        dtype=torch.float32,
        *,
        kept=lambda name: False,  # noqa: ARG005
        late=False,
        permuted=False,
        forgets=False,
        is_readable=True,
        temperature=1.0,
    ):
        self.dtype, self.kept, self.late, self.permuted = dtype, kept, late, permuted
        self.forgets, self.is_readable, self.temperature = forgets, is_readable, temperature
        self.model = merged_copy(policy).to(dtype).requires_grad_(False)
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if head.weight is embedding.weight:
            head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        self.head = next(f"{name}.weight" for name, module in self.model.named_modules() if module is head)
        self.embedding = next(f"{name}.weight" for name, module in self.model.named_modules() if module is embedding)
        self.sent = weights_of(policy)
        self.log = []
        self.holds = False

    def wake(self):
        self.log.append("wake")
        return self.holds

    def load(self, policy):
        self.log.append("load")
        new = weights_of(policy)
        new.setdefault(self.head, new[self.embedding])
        sent = self.sent if self.late and self.holds else new
        self.sent, self.holds = new, True
        order = torch.arange(len(new[self.embedding])).roll(1) if self.permuted else slice(None)
        for name, parameter in self.model.named_parameters():
            if not self.kept(name):
                is_by_token = name in (self.head, self.embedding)
                parameter.data = sent[name][order if is_by_token else slice(None)].to(self.dtype).clone()

    def sample(self, prompts, uniforms, sampling):
        self.log.append("sample")
        assert self.holds
        sampling = dataclasses.replace(sampling, temperature=self.temperature) if self.temperature != 1.0 else sampling
        with torch.autocast("cpu", enabled=False):
            return sample(self.model, prompts, uniforms, sampling)

    def checksums(self):
        return {(name,): checksum(p) for name, p in self.model.named_parameters()} if self.is_readable else {}

    def sleep(self):
        self.log.append("sleep")
        self.holds &= not self.forgets


class FakeLLM:
    """`vllm.LLM` on the CPU: it joins q, k and v, pads the vocabulary, and refuses calls in the wrong order."""

    def __init__(self, model, **options):
        assert AutoConfig.from_pretrained(model).architectures == ["LlamaForCausalLM"]
        self.options, self.log = options, ["start"]
        self.asleep, self.updating = set(), False
        self.weights = {}
        self.copy = None  # a CopyEngine, set by the test

    def init_weight_transfer_engine(self, request):
        assert request == {"init_info": {"packed": True}}

    def start_weight_update(self):
        assert not self.updating
        assert "weights" not in self.asleep
        self.updating = True

    def update_weights(self, request):
        assert self.updating
        self.weights |= request["update_info"]

    def finish_weight_update(self, weight_version=None):
        assert weight_version is None
        self.updating = False
        self.log.append("load")
        self.copy.sent, self.copy.holds = dict(self.weights), True
        for name, parameter in self.copy.model.named_parameters():
            source = name if name in self.weights else self.copy.embedding
            assert self.weights[source].dtype == self.copy.dtype
            parameter.data = self.weights[source].clone()

    def reset_prefix_cache(self):
        self.log.append("reset")
        return True

    def sleep(self, level):
        self.log.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        self.copy.holds &= level == 1

    def wake_up(self, tags):
        self.asleep -= set(tags)

    def generate(self, prompts, params, *, use_tqdm):
        assert not self.asleep
        assert not use_tqdm
        self.log.append("generate")
        one = params[0]
        assert (one.ignore_eos, one.logprobs, one.detokenize) == (True, 0, False)
        sampling = Sampling(one.temperature, min_new_tokens=one.min_tokens + 1, stop=frozenset(one.stop_token_ids))
        uniforms = torch.stack([torch.rand(one.max_tokens, generator=generator(p.seed, "vllm")) for p in params])
        responses = self.copy.sample([prompt["prompt_token_ids"] for prompt in prompts], uniforms, sampling)
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=tuple(r.ids),
                        logprobs=[{i: SimpleNamespace(logprob=x)} for i, x in zip(r.ids, r.logprobs, strict=True)],
                    )
                ]
            )
            for r in responses
        ]

    def apply_model(self, function):
        weights = dict(self.copy.model.named_parameters())
        joined = {}
        for name, weight in weights.items():
            if ".q_proj." in name:
                parts = [weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                joined[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
            elif name == self.copy.embedding:
                joined[name] = torch.nn.functional.pad(weight, (0, 0, 0, 3))
            elif not any(f".{part}_proj." in name for part in "kv"):
                joined[name] = weight
        mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        model = SimpleNamespace(packed_modules_mapping=mapping, named_parameters=joined.items)
        return [function(model)]


class _Sender:
    """The trainer's side of a transfer: the order of calls of vLLM's IPCTrainerWeightTransferEngine."""

    @classmethod
    def trainer_init(cls, *, init_info, client, source):
        sender = cls()
        sender.client, sender.source = client, source
        assert init_info.rank == 0
        client.init_weight_transfer_engine({"packed": init_info.packed})
        return sender

    def send_weights(self):
        self.client.start_weight_update()
        expected = [(one.name, one.dtype, one.shape) for one in self.source.metadata]
        sent = dict(self.source.iter_full())
        assert [(name, weight.dtype, tuple(weight.shape)) for name, weight in sent.items()] == expected
        for name, weight in sent.items():
            self.client.update_weights({name: weight.clone()})
        self.client.finish_weight_update()


def fake_vllm(monkeypatch):
    """Put modules named as vLLM's into `sys.modules`."""
    contents = {
        "vllm": {"LLM": FakeLLM, "SamplingParams": SimpleNamespace, "TokensPrompt": dict},
        "vllm.config": {"WeightTransferConfig": SimpleNamespace},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {
            "ParamMeta": lambda name, dtype, shape: SimpleNamespace(name=name, dtype=dtype, shape=shape),
            "WeightSource": object,
            "WeightTransferTrainerFactory": _Sender,
        },
        "vllm.distributed.weight_transfer.ipc_engine": {"IPCTrainerInitInfo": SimpleNamespace},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
