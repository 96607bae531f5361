"""What lets two trainers of one benchmark take turns: each waits at the end of every step until it is told to go on.

Both workers import it, each in its own environment, so it has nothing but Python's own library, torch and transformers.

A worker is a process that reads a command a line from its standard input and answers with a JSON object a line.
Whatever its libraries print goes to its standard error.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

Facts = dict[str, Any]


class Gate:
    """The end of a worker's step, where it waits.

    Seconds of a step run from the driver's `go` to the worker's next `arrive`. `cpu_s` is all of the process's
    threads since the last answer: what a background thread did while the other side had its turn counts, and is
    added to `wall_s` too, so that work can't be hidden in the other's time.
    """

    def __init__(self, cores: list[int]):
        os.sched_setaffinity(0, cores)
        self.answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.actions: dict[str, Callable[[Facts], Facts]] = {}
        """Further commands, by name: each is given the command and returns what to answer."""
        self.base_rss = 0
        self.wall_from = self.cpu_from = self.cpu_paused = 0.0
        self.is_running = False

    def mark_base(self) -> None:
        """Everything is imported, no model is loaded: memory is counted from here.

        A step of a model of a few numbers comes first, so that what libraries load when they are first used, their
        own code above all, is not taken for the trainer's.
        """
        use_libraries()
        gc.collect()
        self.base_rss = memory()["VmRSS"]

    def arrive(self, facts: Callable[[], Facts] | None = None) -> None:
        """A step is over; `facts` are asked for once the clocks stand still. Returns when the next one may begin."""
        if self.is_running:
            wall, cpu = time.perf_counter() - self.wall_from, time.process_time() - self.cpu_from
            paused = self.cpu_from - self.cpu_paused
            answer = {"wall_s": wall + paused, "cpu_s": cpu + paused, "paused_cpu_s": paused}
            self.answer(answer | {"peak_rss": memory()["VmHWM"] - self.base_rss} | (facts() if facts else {}))
        else:
            self.answer({"ready": True, "base_rss": self.base_rss})
        self.is_running = False
        self.cpu_paused = time.process_time()
        for line in sys.stdin:
            command = json.loads(line)
            match command["do"]:
                case "go":
                    self.is_running = True
                    self.cpu_from, self.wall_from = time.process_time(), time.perf_counter()
                    return
                case "forget peak":
                    Path("/proc/self/clear_refs").write_text("5")
                    self.answer({})
                case "quit":
                    break
                case name:
                    self.answer(self.actions[name](command))
            # Neither the facts nor these commands are a part of the step.
            self.cpu_paused = time.process_time()
        self.leave()

    def answer(self, facts: Facts) -> None:
        self.answers.write(json.dumps(facts) + "\n")

    def leave(self) -> NoReturn:
        """End the process at once, in the middle of a training that nobody needs the rest of."""
        self.answers.close()
        sys.stderr.flush()
        os._exit(0)


def use_libraries() -> None:
    """A training step of a tiny Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.arange(64).expand(4, 64)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def memory() -> dict[str, int]:
    """VmRSS (what is resident now) and VmHWM (the most that was since `forget peak`), bytes."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) * 1024
    return found
