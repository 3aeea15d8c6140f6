"""MiniGPT-4's official files as one checkpoint: which there are, the YAML that names them, their config.json.

Sizes come from the shapes of the tensors; no file of tensors is opened here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ingot.config.files.yaml_text import YamlError, load_yaml
from ingot.errors import CheckpointError, NoSuchPathError

if TYPE_CHECKING:
    from ingot.checkpoint.shard_reader import TensorInfo

MODEL = "minigpt4"
ARCHITECTURE = "MiniGPT4ForConditionalGeneration"
SECTION = "minigpt4"  # of config.json: what is not the LLM's
JOINED = 4  # patches that are one position without a Q-Former
INNER = "model"  # the key under which BLIP-2's and MiniGPT-4's files have their tensors
_SUFFIXES = (".yaml", ".yml")
_AGAIN = "give the official files, of one model"
_QUERY_LAYER = re.compile(r"qformer\.Qformer\.bert\.encoder\.layer\.(\d+)\.")
_BLOCK = re.compile(r"vit\.blocks\.(\d+)\.")


@dataclass(frozen=True)
class MiniGPT4Files:
    """Where the parts are, and what their tensors do not say.

    Attributes:
        llm: a LLaMA or Vicuna folder.
        vit: EVA-ViT-g: names at the top level.
        qformer: BLIP-2's query tokens, Q-Former and ``ln_vision``; None: the Llama-2 variant, which has none
            and joins four neighbouring patches.
        projector: MiniGPT-4's own ``llama_proj``.
        image_size: side of a picture in pixels.
        vit_depth: blocks that run; the file holds one more, whose output is not used.
        vit_heads, qformer_heads: attention heads.
    """

    llm: Path
    vit: Path
    projector: Path
    qformer: Path | None = None
    image_size: int = 224
    vit_depth: int = 39
    vit_heads: int = 16
    qformer_heads: int = 12

    @classmethod
    def read(cls, file: Path) -> Self:
        """Of a YAML file, whose paths are relative to it.

        Raises CheckpointError where a key is missing, unknown or of the wrong type.
        """
        if not file.is_file():
            raise NoSuchPathError("no such file", seen=file, fix="correct the path")
        try:
            found = load_yaml(file)
        except (YamlError, OSError) as error:
            fix = "a YAML file of keys and values"
            raise CheckpointError(f"cannot read {file}", seen=error, fix=fix) from None
        known = {one.name: one.default for one in fields(cls)}
        if not isinstance(found, dict) or found.pop("model", None) != MODEL:
            what = f"{file} names no files of a model that Ingot knows"
            raise CheckpointError(what, allowed=f"model: {MODEL}", fix="add the key")
        odd = sorted(set(found) - set(known))
        odd += [name for name in ("llm", "vit", "projector") if name not in found]
        paths = ("llm", "vit", "projector", "qformer")
        odd += [n for n, v in found.items() if n in known and type(v) is not (str if n in paths else int)]
        odd += [n for n, v in found.items() if n not in paths and isinstance(v, int) and v < 1]
        if odd:
            raise CheckpointError(
                f"{file} has keys that are unknown, missing or of the wrong type",
                seen=odd,
                allowed=f"model and {', '.join(known)}",
            )
        placed = {n: file.parent / v if n in paths else v for n, v in found.items()}
        return cls(**placed)

    @property
    def chat_format(self) -> str:
        """Of prompts: that of the official configuration which the variant has."""
        return MODEL if self.qformer is not None else f"{MODEL}-llama2"

    @property
    def parts(self) -> dict[str, tuple[Path, str | None]]:
        """Files beside the LLM's by the names of their parts, and the key that their tensors are under."""
        found = {"vit": (self.vit, None), "projector": (self.projector, INNER)}
        return found if self.qformer is None else found | {"qformer": (self.qformer, INNER)}


def is_minigpt4(path: Path) -> bool:
    """Whether a path is meant as such a YAML file; it may not be there."""
    return path.suffix in _SUFFIXES and not path.is_dir()


def config_of(
    files: MiniGPT4Files, llm: Mapping[str, Any], stored: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """config.json of the whole: the LLM's, and a section of what the other files' tensors say.

    Raises CheckpointError where the LLM is no LLaMA, a tensor is missing, or the parts do not fit.
    """
    kind = llm.get("model_type")
    if kind != "llama":
        fix = "`llm`, or llm of the YAML file"
        raise CheckpointError("MiniGPT-4's LLM must be a LLaMA or Vicuna", seen=kind, fix=fix)
    # MiniGPT-v2's file has a projector of the same shape as the Llama-2 variant's, and LoRA of its LLM.
    lora = [name for name in stored if name.startswith("projector.") and ".lora_" in name]
    if lora:
        raise CheckpointError(
            "the projector's file is a MiniGPT-v2, which is not supported",
            seen=f"{len(lora)} LoRA tensors of its LLM, such as {lora[0].removeprefix('projector.')}",
            allowed="MiniGPT-4 (pretrained_minigpt4_7b.pth, …) and its Llama-2 variant",
            fix="give MiniGPT-4's projector",
        )
    patch = stored_shape(stored, "vit.patch_embed.proj.weight", 4)
    _, places, width = stored_shape(stored, "vit.pos_embed", 3)
    if math.isqrt(places - 1) ** 2 != places - 1:
        raise CheckpointError("the ViT's position table is of no square", seen=places - 1, fix=_AGAIN)
    blocks = _count(stored, _BLOCK)
    if files.vit_depth > blocks:
        what = "the ViT's file has fewer blocks than are to run"
        raise CheckpointError(what, seen=blocks, allowed=files.vit_depth, fix="vit_depth of the YAML file")
    if files.image_size % patch[2]:
        what = "image_size must be a multiple of the patches' size"
        raise CheckpointError(what, seen=files.image_size, allowed=f"a multiple of {patch[2]}")
    patches = (files.image_size // patch[2]) ** 2
    if files.qformer is None and patches % JOINED:
        what = f"without a Q-Former {JOINED} patches are one position"
        raise CheckpointError(what, seen=f"{patches} patches", fix="another image_size, or qformer")
    section: dict[str, Any] = {
        "image_size": files.image_size,
        "patch_size": patch[2],
        "vit_width": width,
        "vit_depth": files.vit_depth,
        "vit_blocks": blocks,
        "vit_heads": files.vit_heads,
        "vit_inner": stored_shape(stored, "vit.blocks.0.mlp.fc1.weight", 2)[0],
        "ln_vision": any(name.endswith("ln_vision.weight") for name in stored),
    }
    if files.qformer is not None:
        queries = stored_shape(stored, "qformer.query_tokens", 3)
        inner = "qformer.Qformer.bert.encoder.layer.0.intermediate_query.dense.weight"
        section |= {
            "queries": queries[1],
            "qformer_width": queries[2],
            "qformer_layers": _count(stored, _QUERY_LAYER),
            "qformer_heads": files.qformer_heads,
            "qformer_inner": stored_shape(stored, inner, 2)[0],
        }
    return {**llm, "architectures": [ARCHITECTURE], "model_type": MODEL, SECTION: section}


def stored_shape(stored: Mapping[str, TensorInfo], name: str, dims: int) -> tuple[int, ...]:
    """The shape of a tensor of ``dims`` dimensions; CheckpointError where there is no such tensor."""
    info = stored.get(name)
    if info is None or len(info.shape) != dims:
        seen = "no such tensor" if info is None else list(info.shape)
        what = f"{name} of MiniGPT-4's files gives a size"
        raise CheckpointError(what, seen=seen, allowed=f"a tensor of {dims} dimensions", fix=_AGAIN)
    return info.shape


def _count(stored: Mapping[str, TensorInfo], pattern: re.Pattern[str]) -> int:
    """Layers of a part: one more than the highest number."""
    return 1 + max((int(found[1]) for found in map(pattern.match, stored) if found), default=-1)
