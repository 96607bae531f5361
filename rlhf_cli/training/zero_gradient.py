"""The finding of all stages about a gradient of exactly 0, which stops a run: it would finish without learning."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_cli.health.findings import Finding


def no_gradient(norms: Mapping[str, float], what: str) -> list[Finding]:
    """The finding if a gradient norm of a step that should learn is exactly 0; else nothing.

    >>> no_gradient({"sft/grad_norm": 1e-9}, "step 3")
    []
    """
    zero = [key for key, norm in norms.items() if norm == 0.0]
    if not zero:
        return []
    verb = "is" if len(zero) == 1 else "are"
    return [
        Finding(
            "no_gradient",
            "stop",
            f"{' and '.join(zero)} {verb} exactly 0 in {what}, although there is something to learn. No weight would "
            "ever change.",
            "Look for torch.set_grad_enabled(False), torch.no_grad() or requires_grad_(False) in your reward, judge "
            "and model code, and for weights that are 0 or not finite",
        )
    ]
