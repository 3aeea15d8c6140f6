"""The quantization scheme of every linear layer."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ingot.config.json_config import JsonConfig
from ingot.config.quantization.quant_error import QuantFieldError
from ingot.config.quantization.rptq_options import AFTER_NORMS, RptqConfig, site_of
from ingot.config.quantization.scheme_table import (
    ACTIVATIONS,
    BLOCKS,
    GROUPS,
    HEADS,
    METHODS,
    SCHEMES,
    WEIGHT_SCALES,
    WITH_8_BITS,
    SchemeInfo,
    block_schemes,
    choosing,
    listed,
    of_method,
)
from ingot.errors import ConfigError

SEARCH = "search"
HEAD = "lm_head"
SOURCES = {"gptq": "GPTQ", "awq": "AWQ", "compressed-tensors": "compressed-tensors", "fp8": "fp8",
           "gguf": "GGUF"}  # fmt: skip
REPLACEABLE = frozenset({"gguf"})  # sources whose values a build may dequantize to choose others
_METHOD_WORDS = {"round": "rounding", "gptq": "GPTQ", "awq": "AWQ", "smoothquant": "SmoothQuant"}
_SCALES_LABEL = {"tensor": "one weight scale per layer", BLOCKS: "scales per block of 128 x 128"}
_DEFAULT_ALPHA = 0.5
_DEFAULT_GROUP = 128


@dataclass(frozen=True)
class QuantConfig(JsonConfig):
    """The scheme of every linear layer; the embedding stays in the engine's dtype.

    ``SCHEMES`` says which schemes have a field, and with which values. None is their default.

    Attributes:
        scheme: of the decoder's layers; ``none`` keeps weights in the engine's dtype.
        group: adjacent columns that share a scale, 0: one scale per row; for RPTQ the columns of a block.
        symmetric: quantized values are centered on 0, without zero points.
        method: how the values of the decoder's layers are chosen: ``round``, or from samples ``gptq``,
            ``awq`` or ``smoothquant``, which moves outliers of activations into the weights. The head's are
            rounded.
        head: scheme of the head. A tied head in fewer bits is a copy of the embedding.
        layers: pattern of module names (``layers.0.*``, ``*.down_proj``) → scheme; the last match counts.
            Only ``head`` sets the head's.
        activations: ``dynamic``: scales per token; ``static``: one scale per layer, from samples; ``none``:
            activations keep the engine's dtype, or have RPTQ's scales per block.
        alpha: of ``smoothquant``: 0 leaves the activations unchanged, 1 makes all their channels equally
            large; ``search``: the best of each input by its samples. None: 0.5.
        weight_scales: ``channel``, one per row, ``tensor``, one per layer, or ``block``, one per 128 rows
            and columns, with activations' for 128 columns.
        rotation: an orthogonal matrix rotates the hidden states and the values of heads, which changes no
            output and spreads outliers over channels; not for models with LayerNorm.
        source: the format of a checkpoint that is already quantized (``SOURCES``), whose values are kept;
            empty: the build chooses them. Weights in 8 bits may then have groups and zero points.
        act_order: of ``source``: the columns of a group are not adjacent; layers store their order.
        rptq: RPTQ's sites, clusters, ranges. None: the published ones.

    Raises:
        ConfigError: an unknown name, or a value that no scheme of the config has.
    """

    scheme: str = "none"
    group: int | None = None
    symmetric: bool | None = None
    method: str | None = None
    head: str = "none"
    layers: dict[str, str] = field(default_factory=dict, hash=False)
    activations: str | None = None
    alpha: float | str | None = None
    weight_scales: str = "channel"
    rotation: bool | None = None
    source: str = ""
    act_order: bool = False
    rptq: RptqConfig | None = None

    def __post_init__(self) -> None:
        _expect_one("scheme", "unknown quantization scheme", self.scheme, SCHEMES)
        _expect_one("head", "unsupported scheme for the head", self.head, HEADS)
        if not isinstance(self.layers, dict):
            raise QuantFieldError("layers", "layers maps patterns to schemes", seen=self.layers)
        for pattern, scheme in self.layers.items():
            _expect_one("layers", f"unknown quantization scheme for {pattern!r}", scheme, SCHEMES)
        if self.method is None:
            self._set("method", "gptq" if self.in_blocks else "round")
        _expect_one("method", "unknown quantization method", self.method, METHODS)
        _expect_one("source", "unknown source of quantized weights", self.source, ("", *SOURCES))
        rotating = [scheme for scheme in choosing("rotation") if scheme in self.schemes]
        if rotating and self.in_blocks:
            what = f"{', '.join(rotating)} and RPTQ cannot be combined in one model"
            raise QuantFieldError("layers", what, seen=sorted(self.schemes))
        infos = self._infos()
        own = [info.group for info in infos if len(info.group) > 1]
        sizes = [group for group in GROUPS if all(group in one for one in own)] if own else GROUPS[:1]
        self._take("group", "unsupported group size", sizes, _DEFAULT_GROUP if own else 0)
        default = all(info.symmetric[0] for info in infos)
        choices = (True, False) if self._chooses("symmetric") else (default,)
        self._take("symmetric", "unsupported symmetry", choices, default)
        orders = (False, True) if self.source else (False,)
        _expect_one("act_order", "unsupported act_order", self.act_order, orders)
        self._check_method()
        self._check_activations()
        self._check_alpha()
        self._check_rptq()
        choices = (True, False) if rotating else (False,)
        self._take("rotation", "unsupported rotation", choices, bool(rotating))

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes of the decoder's layers."""
        return tuple(dict.fromkeys((self.scheme, *self.layers.values())))

    def _infos(self) -> list[SchemeInfo]:
        """The layers' schemes; weights of a quantized checkpoint may have groups and zero points."""
        found = [SCHEMES[scheme] for scheme in self.schemes]
        if not self.source:
            return found
        wide: dict[str, Any] = {"group": GROUPS, "symmetric": (False, True)}
        return [replace(info, **wide) if info.weight_only else info for info in found]

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _take(self, name: str, what: str, allowed: Iterable[object], default: object = None) -> None:
        """Set a field's default and check it; where no layer has it, the error names the schemes that do."""
        if getattr(self, name) is None:
            self._set(name, default)
        owners = ", ".join(choosing(name))
        unfit = f"{{{name}}}, which {self.layers_label} does not support"
        fix = f"{unfit}: leave it out, or use a {{scheme}} of {owners}"
        if self.schemes == ("none",):
            fix = f"{{scheme}}, which is missing or none: {{{name}}} needs one of {owners}"
        _expect_one(name, what, getattr(self, name), allowed, "" if self._chooses(name) else fix)

    def _chooses(self, name: str) -> bool:
        """Whether a layer's scheme leaves a choice of a field."""
        return any(len(getattr(info, name)) > 1 for info in self._infos())

    def _check_method(self) -> None:
        """Check the method; layers that always need samples restrict those of the others."""
        infos = self._infos()
        every = {method for info in infos for method in info.method}
        every -= {"gptq", "awq"} if self.source else set()
        own = [info.method for info in infos if info.in_blocks]
        methods = [m for m in METHODS if (all(m in one for one in own) if own else m in every)]
        owners = ", ".join(of_method(str(self.method)))
        if self.source:
            fix = "{method}: leave it out, the checkpoint's quantized values are kept"
        elif self.schemes == ("none",):
            fix = f"{{scheme}}, which is missing or none: {{method}} {self.method} needs one of {owners}"
        else:
            supported = f"{self.layers_label} supports {', '.join(methods)}"
            fix = f"{{method}} or {{scheme}}: {supported}; {self.method} needs one of {owners}"
        _expect_one("method", "unsupported quantization method", self.method, methods, fix)

    def _check_activations(self) -> None:
        own = [info.activations for info in self._infos() if info.activations != ("none",)]
        allowed = [kind for kind in ACTIVATIONS if all(kind in one for one in own)] if own else ["none"]
        if self.method not in ("round", "smoothquant"):
            allowed = allowed[:1]  # only these two find a scale
        self._take("activations", "unsupported activations", allowed, allowed[0])
        offered = [info.weight_scales for info in self._infos() if len(info.weight_scales) > 1]
        scales = [
            kind for kind in (*WEIGHT_SCALES, BLOCKS) if offered and all(kind in one for one in offered)
        ]
        self._take("weight_scales", "unsupported weight scales", scales or WEIGHT_SCALES[:1])

    def _check_alpha(self) -> None:
        smooth = self.method == "smoothquant"
        alpha = _DEFAULT_ALPHA if self.alpha is None and smooth else self.alpha
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 <= alpha <= 1
        if smooth and not number and alpha != SEARCH:
            raise QuantFieldError("alpha", "invalid alpha", seen=alpha, allowed=f"0 to 1, or {SEARCH}")
        if not smooth and alpha is not None:
            owners = of_method("smoothquant")
            lacks = "{method} smoothquant"
            if not {*owners} & {*self.schemes}:
                lacks = f"{{scheme}} {', '.join(owners)} and {lacks}"
            fix = f"{{alpha}}, which only smoothquant supports: leave it out, or add {lacks}"
            raise QuantFieldError("alpha", "invalid alpha", seen=alpha, allowed="none", advice=fix)
        self._set("alpha", float(alpha) if isinstance(alpha, int) else alpha)

    def _check_rptq(self) -> None:
        if not self.in_blocks:
            if self.rptq is not None:
                fix = "leave it out, or use a {scheme} of " + ", ".join(block_schemes())
                advice = f"{{rptq}}, which {self.layers_label} does not support: {fix}"
                what = "only RPTQ has clusters and sites"
                raise QuantFieldError("rptq", what, seen=self.rptq, advice=advice)
            return
        self._set("rptq", self.rptq or RptqConfig())
        assert self.rptq is not None
        narrow = any(SCHEMES[scheme].in_blocks and SCHEMES[scheme].input_bits < 8 for scheme in self.schemes)
        if not narrow and self.rptq.eight_bits != AFTER_NORMS:
            what = f"{self.layers_label} has no activations in 4 bits"
            advice = "{eight_bits}: leave it out, or use {scheme} rptq-w4a4"
            raise QuantFieldError("eight_bits", what, seen=self.rptq.eight_bits, advice=advice)

    def at(self, module: str) -> QuantConfig:
        """The config of one linear layer, by its name in the decoder; ``layers`` and ``head`` are
        resolved.
        """
        return _of_layer(self, tuple(self.layers.items()), module)

    def check_names(self, modules: Iterable[str]) -> None:
        """Refuse patterns that match none of the linear layers ``modules``; the ``ConfigError`` names
        them.
        """
        names = [name for name in modules if name != HEAD]
        idle = [p for p in self.layers if not fnmatch.filter(names, p)]
        if idle:
            leaves = sorted({name.rpartition(".")[2] for name in names})
            of_head = [p for p in idle if fnmatch.fnmatchcase(HEAD, p)]
            fix = f"; for {HEAD}, set `head: {HEADS[-1]}` next to layers" if of_head else ""
            raise ConfigError(
                "patterns in layers match no linear layer",
                seen=idle,
                allowed=f"layers.N.…, for example {names[0] if names else 'none'}; they end in {leaves}",
                field="quant",
                fix=f"`quant`: layers in its file{fix}",
            )

    def check_in_memory(self) -> None:
        """Refuse methods that need samples, where there is only a model; the ``ConfigError`` names
        ``ingot build``.
        """
        if self.calibrated:
            by_method = self.method != "round"
            chosen = f"`quant={'FILE.yaml' if self.layers else self.scheme}`"
            if not self.in_blocks:
                chosen += f" `method={self.method}`" if by_method else " `activations=static`"
            what = self.method_word if by_method else "a static scale"
            raise ConfigError(
                f"{'RPTQ' if self.in_blocks else what} needs calibration, which only a build does",
                seen=self.needs_samples,
                allowed="a scheme other than RPTQ, method round, activations dynamic",
                fix=f"`ingot build CHECKPOINT` with {chosen} `calib=FILE`, then load that engine",
            )

    @property
    def in_blocks(self) -> bool:
        """Whether some layer has an RPTQ scheme."""
        return any(scheme in block_schemes() for scheme in self.schemes)

    @property
    def calibrated(self) -> bool:
        """Whether values or scales are chosen from samples."""
        return bool(self.needs_samples)

    @property
    def needs_samples(self) -> str:
        """The options that need calibration samples; empty where none does."""
        if self.source:
            return ""
        parts = [f"method {self.method}"] if self.method != "round" else []
        parts += [scheme for scheme in block_schemes() if scheme in self.schemes]
        parts += ["activations static"] if self.activations == "static" else []
        return ", ".join(parts)

    @property
    def method_word(self) -> str:
        """The method's name, for people."""
        assert self.method is not None
        return _METHOD_WORDS[self.method]

    @property
    def dense(self) -> bool:
        """Whether every weight is in the engine's dtype."""
        return {self.head, *self.schemes} == {"none"}

    @property
    def layers_label(self) -> str:
        """The schemes of the decoder's layers: ``w4a16``, ``w4a16+w8a16``."""
        return "+".join(self.schemes)

    @property
    def label(self) -> str:
        """The layers' schemes, and the head's where it has one."""
        return self.layers_label if self.head == "none" else f"{self.layers_label}, head {self.head}"

    @property
    def summary(self) -> str:
        """What is stored, for people."""
        parts = [self.label]
        if self.source or self._chooses("symmetric"):
            parts.append(f"one scale per {self.group} columns" if self.group else "one scale per row")
            parts.append("symmetric" if self.symmetric else "asymmetric")
        if self.in_blocks:
            assert self.rptq is not None
            parts.append(f"activations in blocks of {self.group} columns, {self.rptq.summary}")
            wide = [site for site in self.rptq.eight_bits if "rptq-w4a4" in self.schemes]
            parts += [f"{listed(wide)} in 8 bits"] if wide else []
        parts += ["columns grouped by act-order"] if self.act_order else []
        if self._chooses("rotation"):
            parts.append(f"one inner scale per {self.group} columns")
            parts.append("rotated" if self.rotation else "not rotated")
        if self.activations != "none":
            parts.append(f"{self.activations} activations")
            parts += [_SCALES_LABEL[self.weight_scales]] if self.weight_scales in _SCALES_LABEL else []
        if self.method == "smoothquant":
            parts.append(f"by SmoothQuant with alpha {self.alpha}")
        elif self.source:
            parts.append(f"as in the {SOURCES[self.source]} checkpoint")
        elif not self.dense:
            parts.append(f"by {self.method_word}")
        if self.layers:
            count = len(self.layers)
            parts.append(f"{count} layer {'pattern' if count == 1 else 'patterns'} over {self.scheme}")
        return ", ".join(parts)


@functools.lru_cache(maxsize=1024)  # a model asks several times for each layer
def _of_layer(quant: QuantConfig, layers: tuple[tuple[str, str], ...], module: str) -> QuantConfig:
    """``QuantConfig.at``; ``layers`` are the config's own, whose order a comparison of configs ignores."""
    scheme = quant.head if module == HEAD else quant.scheme
    if module != HEAD:
        matched = [s for pattern, s in layers if fnmatch.fnmatchcase(module, pattern)]
        scheme = matched[-1] if matched else scheme
    if quant.rptq is not None and site_of(module) in quant.rptq.eight_bits:
        scheme = WITH_8_BITS.get(scheme, scheme)
    info = SCHEMES[scheme]
    if quant.source and info.weight_only and module != HEAD:
        source, order = quant.source, quant.act_order
        return QuantConfig(scheme, quant.group, quant.symmetric, source=source, act_order=order)
    method = quant.method if quant.method in info.method and module != HEAD else "round"
    fields = ("group", "symmetric", "activations", "weight_scales", "rotation")
    kept = {name: getattr(quant, name) for name in fields if len(getattr(info, name)) > 1}
    alpha = quant.alpha if method == "smoothquant" else None
    return QuantConfig(scheme, method=method, alpha=alpha, **kept)


def _expect_one(name: str, what: str, seen: object, allowed: Iterable[object], advice: str = "") -> None:
    choices = list(allowed)
    if not any(seen == one and type(seen) is type(one) for one in choices):
        if any(str(seen) == str(one) for one in choices):  # a number or truth value in quotes
            seen = f"{seen!r} of type {type(seen).__name__}"
        raise QuantFieldError(name, what, seen=seen, allowed=choices, advice=advice)
