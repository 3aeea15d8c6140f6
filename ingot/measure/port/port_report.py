"""What it takes to port a checkpoint's architecture: the report of ``ingot port``.

report = port_report(Path("stablelm-2-1_6b"))
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.config.json_config import JsonConfig
from ingot.errors import CheckpointError
from ingot.measure.port.module_order import ModuleOrder, module_order
from ingot.measure.port.nearest import ConfigComparison, compare
from ingot.measure.port.tensor_patterns import tensor_patterns
from ingot.models.architecture import Architecture
from ingot.models.model_registry import find_architecture

_NOT_RUN = ModuleOrder()


@dataclass(frozen=True)
class PortReport(JsonConfig):
    """A checkpoint beside the registered architectures.

    Attributes:
        hf_names: ``architectures`` of its config.json.
        model_type: of its config.json; None: it has none.
        registered: the architecture that Ingot has for it; None: it is to be ported.
        refused: why that architecture refuses its config.json; None: it does not.
        nearest: the nearest architecture; None where one is registered and takes it.
        others: the scores of the others, the best first.
        modules: of Hugging Face's class, in running order.
    """

    hf_names: tuple[str, ...]
    model_type: str | None
    registered: str | None = None
    refused: str | None = None
    nearest: ConfigComparison | None = None
    others: tuple[tuple[str, float], ...] = ()
    modules: ModuleOrder = _NOT_RUN


def port_report(folder: Path) -> PortReport:
    """Compare a checkpoint with what Ingot has; reads no weights.

    Raises:
        CheckpointError: it is no checkpoint, its files are damaged, its config.json names no architecture,
            or it is like nothing that Ingot has.
    """
    with open_checkpoint(folder) as checkpoint:
        hf, tensors = checkpoint.config, checkpoint.tensors
    names, model_type = _names(hf), hf.get("model_type")
    kind = None if model_type is None else str(model_type)
    known = _registered(names)
    refused = None if known is None else _refused(known, hf)
    if known is not None and refused is None:
        return PortReport(names, kind, known.name)
    comparisons = compare(hf, tensor_patterns(tensors))
    own = [one for one in comparisons if known is not None and one.architecture == known.name]
    nearest = (own or comparisons)[0]
    others = tuple((one.architecture, one.score) for one in comparisons if one is not nearest)
    registered = None if known is None else known.name
    return PortReport(names, kind, registered, refused, nearest, others, module_order(folder, hf))


def _names(hf: dict[str, Any]) -> tuple[str, ...]:
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            "config.json names no architecture",
            seen=f"architectures {names!r}",
            allowed='a list with the name of a class, such as ["LlamaForCausalLM"]',
            fix="download the original config.json",
        )
    return tuple(names)


def _registered(names: tuple[str, ...]) -> Architecture | None:
    try:
        return find_architecture(names)
    except CheckpointError:
        return None


def _refused(architecture: Architecture, hf: dict[str, Any]) -> str | None:
    try:
        architecture.read_config(hf)
    except CheckpointError as error:
        return error.what if error.seen is None else f"{error.what}: {error.seen}"
    return None
