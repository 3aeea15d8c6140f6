"""How weights are stored in fewer bits.

Covers the choice of a scheme for every linear layer, and its checks.

    quant = QuantConfig("w4a16", group=64, layers={"layers.0.*": "w8a16"})
    quant.at("layers.0.mlp.down_proj").scheme           # "w8a16"
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ingot.config.json_config import JsonConfig
from ingot.config.quantization.quant_error import QuantFieldError
from ingot.config.quantization.rptq_options import AFTER_NORMS, RptqConfig, site_of
from ingot.config.quantization.scheme_table import (
    ACTIVATIONS,
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
SOURCES = {"gptq": "GPTQ", "awq": "AWQ", "compressed-tensors": "compressed-tensors"}
_METHOD_WORDS = {"round": "rounding", "gptq": "GPTQ", "awq": "AWQ", "smoothquant": "SmoothQuant"}
_DEFAULT_ALPHA = 0.5
_DEFAULT_GROUP = 128


@dataclass(frozen=True)
class QuantConfig(JsonConfig):
    """The scheme of every linear layer; the embedding stays in the engine's dtype.

    Which schemes take a field, and with which values, is in ``SCHEMES``. None is their default.

    Attributes:
        scheme: of the decoder's layers; ``none`` keeps weights in the engine's dtype.
        group: neighbouring columns that share a scale, 0: a row has one; in RPTQ's schemes those of a block.
        symmetric: quantized values stand around 0, and there are no zeros.
        method: how the values of the decoder's layers are chosen: ``round``, or from samples ``gptq``,
            ``awq`` or ``smoothquant``, which moves outliers of activations into the weights. The head's are
            rounded.
        head: scheme of the head. A tied head in fewer bits is a copy of the embedding.
        layers: pattern of module names (``layers.0.*``, ``*.down_proj``) → scheme; the last that matches
            counts. The head is ``head``'s alone.
        activations: ``dynamic``: each token has its scales; ``static``: one scale per layer, from samples;
            ``none``: activations keep the engine's dtype, or have RPTQ's scales per block.
        alpha: of ``smoothquant``: 0 leaves the activations as they are, 1 makes all their channels equally
            large; ``search``: the best of each input by its samples. None: 0.5.
        weight_scales: ``channel``, one per row, or ``tensor``, one per layer.
        rotation: an orthogonal matrix rotates the hidden states and the values of heads, which changes no
            output and spreads outliers over channels; not of models with LayerNorm.
        source: the format of a checkpoint that somebody else quantized (``SOURCES``), whose values are kept;
            empty: the build chooses them. Weights alone in 8 bits may then have groups and zeros, too.
        act_order: of ``source``: groups are of columns that are not neighbours; layers keep their order.
        rptq: of RPTQ's schemes: sites, clusters, ranges. None: the published ones.

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
            raise QuantFieldError(
                "layers",
                f"{', '.join(rotating)} and RPTQ cannot be combined in one model",
                seen=sorted(self.schemes),
            )
        self._check_group()
        self._check_symmetric()
        orders = (False, True) if self.source else (False,)
        _expect_one("act_order", "unsupported act_order", self.act_order, orders)
        self._check_method()
        self._check_activations()
        self._check_alpha()
        self._check_rptq()
        self._take(
            "rotation", "unsupported rotation", (True, False) if rotating else (False,), bool(rotating)
        )

    @property
    def schemes(self) -> tuple[str, ...]:
        """Those of the decoder's layers."""
        return tuple(dict.fromkeys((self.scheme, *self.layers.values())))

    def _infos(self) -> list[SchemeInfo]:
        """What the layers' schemes leave to choose; others' quantized weights may have groups and zeros."""
        found = [SCHEMES[scheme] for scheme in self.schemes]
        if self.source:
            found = [
                replace(info, group=GROUPS, symmetric=(False, True)) if info.weight_only else info
                for info in found
            ]
        return found

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _take(self, name: str, what: str, allowed: Iterable[object], default: object = None) -> None:
        """Check a field, after None became the default; where no layer has it, tell which schemes do."""
        if getattr(self, name) is None:
            self._set(name, default)
        fix = "" if self._chooses(name) else self._of_others(name)
        _expect_one(name, what, getattr(self, name), allowed, fix)

    def _chooses(self, name: str) -> bool:
        """Whether a layer's scheme leaves a choice of a field."""
        return any(len(getattr(info, name)) > 1 for info in self._infos())

    def _of_others(self, name: str) -> str:
        """How to mend a field that none of the config's schemes has."""
        owners = ", ".join(choosing(name))
        if self.schemes == ("none",):
            return f"{{scheme}}, which is missing or none: {{{name}}} needs one of {owners}"
        unfit = f"{{{name}}}, which {self.layers_label} does not support"
        return f"{unfit}: leave it out, or use a {{scheme}} of {owners}"

    def _check_method(self) -> None:
        """Layers that always take samples take no other methods than theirs beside them."""
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
            supported = (
                f"{self.layers_label} supports {', '.join(methods)}; {self.method} needs one of {owners}"
            )
            fix = f"{{method}} or {{scheme}}: {supported}"
        _expect_one("method", "unsupported quantization method", self.method, methods, fix)

    def _check_group(self) -> None:
        own = [info.group for info in self._infos() if len(info.group) > 1]
        sizes = [group for group in GROUPS if all(group in one for one in own)] if own else GROUPS[:1]
        self._take("group", "unsupported group size", sizes, _DEFAULT_GROUP if own else 0)

    def _check_symmetric(self) -> None:
        default = all(info.symmetric[0] for info in self._infos())
        allowed = (True, False) if self._chooses("symmetric") else (default,)
        self._take("symmetric", "unsupported symmetry", allowed, default)

    def _check_activations(self) -> None:
        own = [info.activations for info in self._infos() if info.activations != ("none",)]
        allowed = [kind for kind in ACTIVATIONS if all(kind in one for one in own)] if own else ["none"]
        if self.method not in ("round", "smoothquant"):
            allowed = allowed[:1]  # nothing else than these two finds a scale
        self._take("activations", "unsupported activations", allowed, allowed[0])
        scales = WEIGHT_SCALES if self._chooses("weight_scales") else WEIGHT_SCALES[:1]
        self._take("weight_scales", "unsupported weight scales", scales)

    def _check_alpha(self) -> None:
        smooth = self.method == "smoothquant"
        alpha = _DEFAULT_ALPHA if self.alpha is None and smooth else self.alpha
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 <= alpha <= 1
        if not (number or alpha == SEARCH if smooth else alpha is None):
            owners = of_method("smoothquant")
            lacks = "{method} smoothquant"
            if not {*owners} & {*self.schemes}:
                lacks = f"{{scheme}} {', '.join(owners)} and {lacks}"
            fix = f"{{alpha}}, which only smoothquant supports: leave it out, or add {lacks}"
            allowed = f"0 to 1, or {SEARCH}" if smooth else "none"
            advice = "" if smooth else fix
            raise QuantFieldError("alpha", "invalid alpha", seen=alpha, allowed=allowed, advice=advice)
        self._set("alpha", float(alpha) if isinstance(alpha, int) else alpha)

    def _check_rptq(self) -> None:
        if not self.in_blocks:
            if self.rptq is not None:
                fix = "leave it out, or use a {scheme} of " + ", ".join(block_schemes())
                advice = f"{{rptq}}, which {self.layers_label} does not support: {fix}"
                raise QuantFieldError(
                    "rptq", "only RPTQ has clusters and sites", seen=self.rptq, advice=advice
                )
            return
        self._set("rptq", self.rptq or RptqConfig())
        assert self.rptq is not None
        narrow = any(SCHEMES[scheme].in_blocks and SCHEMES[scheme].input_bits < 8 for scheme in self.schemes)
        if not narrow and self.rptq.eight_bits != AFTER_NORMS:
            raise QuantFieldError(
                "eight_bits",
                f"{self.layers_label} has no activations in 4 bits",
                seen=self.rptq.eight_bits,
                advice="{eight_bits}: leave it out, or use {scheme} rptq-w4a4",
            )

    def at(self, module: str) -> QuantConfig:
        """The config of one linear layer, by its name in the decoder: ``layers`` and ``head`` are decided."""
        return _of_layer(self, tuple(self.layers.items()), module)

    def check_names(self, modules: Iterable[str]) -> None:
        """Refuse patterns that match none of the linear layers ``modules``.

        Raises:
            ConfigError: naming all of them.
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
        """Refuse methods that need samples, where there is only a model.

        Raises:
            ConfigError: naming ``ingot build``.
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
        """Whether some layer is of RPTQ."""
        return any(scheme in block_schemes() for scheme in self.schemes)

    @property
    def calibrated(self) -> bool:
        """Whether values or scales are chosen by what layers see."""
        return bool(self.needs_samples)

    @property
    def needs_samples(self) -> str:
        """What is chosen by samples, as it is asked for; empty where nothing is."""
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
        """The schemes of the decoder's layers in a word: ``w4a16``, ``w4a16+w8a16``."""
        return "+".join(self.schemes)

    @property
    def label(self) -> str:
        """A short name: the layers' schemes, and the head's where it has one."""
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
            parts += [
                f"one inner scale per {self.group} columns",
                "rotated" if self.rotation else "not rotated",
            ]
        if self.activations != "none":
            parts.append(f"{self.activations} activations")
            parts += ["one weight scale per layer"] if self.weight_scales == "tensor" else []
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
    """The config of one linear layer; ``layers`` are the config's own, whose order counts and which a
    comparison of configs does not see.
    """
    scheme = quant.head if module == HEAD else quant.scheme
    if module != HEAD:
        matched = [s for pattern, s in layers if fnmatch.fnmatchcase(module, pattern)]
        scheme = matched[-1] if matched else scheme
    if quant.rptq is not None and site_of(module) in quant.rptq.eight_bits:
        scheme = WITH_8_BITS.get(scheme, scheme)
    info = SCHEMES[scheme]
    if quant.source and info.weight_only and module != HEAD:
        return QuantConfig(
            scheme, quant.group, quant.symmetric, source=quant.source, act_order=quant.act_order
        )
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
