"""Let the two trainers of a benchmark take turns: each waits at the end of every step until it is told to continue.

Both workers import this file, each in its own environment, so it uses only the standard library, torch and
transformers.

A worker is a process that reads one command per line from its standard input and answers with one JSON object per line.
What its libraries print goes to its standard error.
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

    The seconds of a step run from the driver's `go` to the worker's next `arrive`. `cpu_s` counts all threads of the
    process since the last answer. Work that a background thread did during the other side's turn is included, and
    added to `wall_s` too, so that it cannot be hidden in the other's time.
    """

    def __init__(self, cores: list[int]):
        os.sched_setaffinity(0, cores)
        self.answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.actions: dict[str, Callable[[Facts], Facts]] = {}
        """Further commands by name; each takes the command and returns the answer."""
        self.base_rss = 0
        self.wall_from = self.cpu_from = self.cpu_paused = 0.0
        self.is_running = False

    def mark_base(self) -> None:
        """Count memory from here: everything is imported, no model is loaded.

        A step of a tiny model comes first, so that what libraries load at their first use, mostly their own code, is
        not counted as the trainer's.
        """
        use_libraries()
        gc.collect()
        self.base_rss = memory()["VmRSS"]

    def arrive(self, facts: Callable[[], Facts] | None = None) -> None:
        """End a step; `facts` are evaluated after the clocks have stopped. Returns when the next step may begin."""
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
            # Neither the facts nor these commands belong to the step.
            self.cpu_paused = time.process_time()
        self.leave()

    def answer(self, facts: Facts) -> None:
        self.answers.write(json.dumps(facts) + "\n")

    def leave(self) -> NoReturn:
        """End the process immediately; the rest of the training is not needed."""
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
    """VmRSS (resident now) and VmHWM (peak since `forget peak`), in bytes."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) * 1024
    return found
