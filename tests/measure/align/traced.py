"""Divergences between two loaded engines, without align's own tracing.

Owns hooks that keep what modules take and give, and the walk over the stages. Knows no bug.

    for divergence in divergences(clean, broken, ids, steps=1): ...
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ingot import LLM, SamplingParams
from ingot.layers.decoder import DecoderLayer
from ingot.layers.mlp import GatedMLP
from ingot.measure.align.first_divergence import Divergence

FLOOR = 1e-6
PARTS = {
    "input_norm": "input_layernorm",
    "attention": "self_attn",
    "post_norm": "post_attention_layernorm",
    "mlp": "mlp",
}
Calls = dict[str, list[tuple[torch.Tensor, torch.Tensor]]]


def trace(llm: LLM, ids: list[int], steps: int) -> Calls:
    """Module name → (input, output) of each call, for the prompt and ``steps - 1`` tokens after it."""
    calls: Calls = {}
    model = llm.engine.model
    handles = [
        module.register_forward_hook(_keeper(calls, name)) for name, module in model.named_modules() if name
    ]
    params = SamplingParams(temperature=0.0, max_new_tokens=steps, ignore_eos=True)
    with llm.tap("layers.*"):
        llm.generate([ids], params)
    for handle in handles:
        handle.remove()
    for number, layer in enumerate(model.layers):
        up = "gate_up_proj" if isinstance(layer.mlp, GatedMLP) else "up_proj"
        for branch, first, last in (("self_attn", "qkv_proj", "o_proj"), ("mlp", up, "down_proj")):
            path = f"layers.{number}.{branch}"
            pairs = zip(calls[f"{path}.{first}"], calls[f"{path}.{last}"], strict=True)
            calls[path] = [(given, added) for (given, _), (_, added) in pairs]
    return calls


def _keeper(calls: Calls, name: str):  # type: ignore[no-untyped-def]
    def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        given = inputs[0]
        if len(inputs) > 1 and isinstance(inputs[1], torch.Tensor) and "norm" in name:
            given = given + inputs[1]
        if isinstance(module, DecoderLayer):
            given, output = inputs[1], output[1]  # type: ignore[index]
        output = output[0] if isinstance(output, tuple) else output
        calls.setdefault(name, []).append((given.clone(), output.clone()))  # type: ignore[attr-defined]

    return keep


def divergences(
    clean: LLM, broken: LLM, ids: list[int], steps: int = 1, least: float = 4 * FLOOR
) -> Iterator[Divergence]:
    """Every stage at which ``broken`` leaves ``clean`` by more than ``least``, in running order."""
    theirs, ours = trace(clean, ids, steps), trace(broken, ids, steps)
    for step in range(steps):
        for stage, layer, name in _stages(clean):
            calls = theirs["layers.0" if name == "embed" else name]
            place, expected = calls[step]
            if name == "embed":
                expected, got = place, ours["layers.0"][step][0]
                place = theirs["embed_tokens"][step][0]
            else:
                got = ours[name][step][1]
            if stage.endswith((".residual", ".output")):
                branch = "self_attn" if stage.endswith("residual") else "mlp"
                source = "post_attention_layernorm" if stage.endswith("residual") else ""
                module = f"layers.{layer}.{source}".rstrip(".")
                which = 0 if source else 1
                place = theirs[f"layers.{layer}.{branch}"][step][1]
                expected, got = theirs[module][step][which], ours[module][step][which]
            if name.endswith("self_attn") and stage.endswith("attention"):
                place = torch.cat([call[0] for call in calls[: step + 1]])
            start = 0 if step == 0 else len(ids) + step - 1
            rows = len(ids) if step == 0 else 1
            positions = torch.arange(start, start + rows)[-expected.shape[0] :]
            if float((got - expected).norm() / expected.norm()) > least:
                yield Divergence(stage, layer, step, positions, place, expected, got, FLOOR)


def _stages(llm: LLM) -> Iterator[tuple[str, int | None, str]]:
    yield "embedding", None, "embed"
    for number in range(len(llm.engine.model.layers)):
        for part, module in PARTS.items():
            yield f"layers.{number}.{part}", number, f"layers.{number}.{module}"
            if part in ("attention", "mlp"):
                sum_ = "residual" if part == "attention" else "output"
                yield f"layers.{number}.{sum_}", number, f"layers.{number}.{module}"
        yield f"layers.{number}", number, f"layers.{number}"
    yield "final_norm", None, "norm"
    yield "logits", None, "lm_head"
