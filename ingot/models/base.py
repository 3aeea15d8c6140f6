"""What a model is to the rest of Ingot.

Owns the description of an architecture as data: its Hugging Face names, how its config reads, and its weight
map. Knows no architecture in particular; each file beside this one declares one.

    LLAMA = Architecture(name="llama", hf_names=("LlamaForCausalLM",), config_from_hf=..., weight_map=...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.checkpoint.weight_map import WeightMap
from ingot.config.model import DecoderConfig
from ingot.errors import CheckpointError, ConfigError
from ingot.layers.context import BuildContext
from ingot.layers.decoder import Decoder

HfConfig = Mapping[str, Any]
LayerRange = tuple[int, int] | None


@dataclass(frozen=True)
class Architecture:
    """One supported architecture.

    Attributes:
        name: Ingot's name, stored in the manifest.
        hf_names: entries of ``architectures`` in config.json that mean this one.
        config_from_hf: config.json → DecoderConfig; raises CheckpointError for what is not supported.
        weight_map: (config of the whole checkpoint, layers to keep) → weight map.
    """

    name: str
    hf_names: tuple[str, ...]
    config_from_hf: Callable[[HfConfig], DecoderConfig]
    weight_map: Callable[[DecoderConfig, LayerRange], WeightMap]

    def read_config(self, hf: HfConfig) -> DecoderConfig:
        """``config_from_hf`` on a file that may hold anything.

        Raises:
            CheckpointError: it lacks a key, or a value is unsupported, of the wrong type or out of range.
        """
        try:
            return self.config_from_hf(hf)
        except ConfigError as error:
            raise CheckpointError(
                error.what, seen=error.seen, allowed=error.allowed, fix="config.json"
            ) from None
        except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"config.json does not describe a {self.name} model", seen=error, fix="config.json"
            ) from None

    def build(self, config: DecoderConfig, ctx: BuildContext, max_seq_len: int) -> Decoder:
        """The modules, uninitialised, on the current default device."""
        return Decoder(config, ctx, max_seq_len)


def require(hf: HfConfig, *keys: str) -> Any:
    """The value under the first of these keys that the config has.

    Raises:
        CheckpointError: it has none of them.
    """
    for key in keys:
        if hf.get(key) is not None:
            return hf[key]
    raise CheckpointError(f"config.json lacks {' or '.join(keys)}", seen=sorted(hf), fix="config.json")
