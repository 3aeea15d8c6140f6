"""How weights are stored in fewer bits.

Owns the choice of a scheme for every linear layer, and its checks. Knows nothing of how a scheme packs or
computes.

    quant = QuantConfig("w4a16", group=64, layers={"layers.0.*": "w8a16"})
    quant.at("layers.0.mlp.down_proj").scheme           # "w8a16"
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ingot.config.base import JsonConfig
from ingot.config.quant_error import QuantFieldError
from ingot.errors import ConfigError

RPTQ = ("rptq-w8a8", "rptq-w4a8", "rptq-w4a4")
SCHEMES = ("none", "w8a16", "w4a16", "w8a8", "w4a8", *RPTQ)
HEADS = ("none", "w8a16")
METHODS = ("round", "gptq", "awq", "smoothquant")
ACTIVATIONS = ("dynamic", "static")
WEIGHT_SCALES = ("channel", "tensor")
SEARCH = "search"
GROUPS = (0, 32, 64, 128)
HEAD = "lm_head"
_METHOD_WORDS = {"round": "rounding", "gptq": "GPTQ", "awq": "AWQ", "smoothquant": "SmoothQuant"}
INNER_GROUPS = (64, 128)  # of w4a8
_GROUPED = "w4a16"
_BOTH = "w8a8"
_INNER = "w4a8"
SOURCES = {"gptq": "GPTQ", "awq": "AWQ", "compressed-tensors": "compressed-tensors"}
_WEIGHT_ONLY = ("w8a16", "w4a16")
_DEFAULT_ALPHA = 0.5
_DEFAULT_GROUP = 128
_RPTQ_METHODS = ("round", "gptq")
_METHODS_OF = {
    "none": METHODS[:1],
    "w8a16": ("round", "gptq", "awq"),
    "w4a16": ("round", "gptq", "awq"),
    "w8a8": ("round", "smoothquant"),
    "w4a8": ("round", "gptq"),
    **dict.fromkeys(RPTQ, _RPTQ_METHODS),
}


@dataclass(frozen=True)
class QuantConfig(JsonConfig):
    """The scheme of every linear layer; the embedding stays in the engine's dtype.

    Attributes:
        scheme: of the decoder's layers; ``none`` keeps weights in the engine's dtype.
        group: neighbouring columns that share a scale in w4a16, 0: one scale per row, or a step in w4a8, 64
            or 128; in RPTQ's schemes the columns of a block. None: 128 for these, else 0.
        symmetric: numbers stand around 0 and there are no zeros. None: False for w4a16 and w4a8, else True.
        method: how the numbers of the decoder's layers are chosen: ``round``, or ``gptq`` and ``awq``, which
            take samples to calibrate with (w4a8 has no ``awq``). None: ``gptq`` where a layer is of RPTQ,
            else ``round``. ``smoothquant``, of w8a8, makes loud channels of activations quieter and the
            weights that read them louder, by samples. The head's are rounded.
        head: scheme of the head. A tied head in fewer bits is a copy of the embedding.
        layers: pattern of module names (``layers.0.*``, ``*.down_proj``) → scheme; the last that matches
            counts. The head is ``head``'s alone.
        activations: of w8a8: ``dynamic``, scales that each token comes with, or ``static``, one scale a
            layer from samples; of w4a8 dynamic; None: dynamic. ``none`` without them: they stay in the
            engine's dtype, or, in RPTQ's schemes, have scales for blocks of columns, from samples.
        alpha: of ``smoothquant``: 0 leaves the activations as they are, 1 makes all their channels equally
            loud; ``search``: the best of each input by its samples. None: 0.5 for ``smoothquant``.
        weight_scales: of w8a8: ``channel``, one a row, or ``tensor``, one a layer.
        rotation: with w4a8: the stream and the values of heads are turned by an orthogonal matrix, which
            changes no output and makes no channel loud; not of models with LayerNorm. None: True for w4a8.
        source: the format of a checkpoint that somebody else quantized (``SOURCES``), whose numbers are kept;
            empty: the build chooses them. w8a16 may then have groups and zeros too.
        act_order: of ``source``: groups are of columns that are not neighbours; layers keep their order.

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

    def __post_init__(self) -> None:
        _expect_one("scheme", "unknown quantization scheme", self.scheme, SCHEMES)
        _expect_one("head", "unsupported scheme for the head", self.head, HEADS)
        if not isinstance(self.layers, dict):
            raise QuantFieldError("layers", "layers maps patterns to schemes", seen=self.layers)
        for pattern, scheme in self.layers.items():
            _expect_one("layers", f"unknown quantization scheme for {pattern!r}", scheme, SCHEMES)
        schemes = {self.scheme, *self.layers.values()}
        clusters = bool(schemes & {*RPTQ})
        if self.method is None:
            object.__setattr__(self, "method", "gptq" if clusters else "round")
        _expect_one("method", "unknown quantization method", self.method, METHODS)
        _expect_one("source", "unknown source of quantized weights", self.source, ("", *SOURCES))
        inner = _INNER in schemes
        if inner and clusters:
            raise QuantFieldError(
                "layers", "w4a8 and RPTQ cannot be combined in one model", seen=sorted(schemes)
            )
        self._check_group(_GROUPED in schemes or (bool(self.source) and "w8a16" in schemes), clusters, inner)
        _expect_one(
            "act_order", "unsupported act_order", self.act_order, (False, True) if self.source else (False,)
        )
        self._check_method(schemes, clusters)
        self._check_activations(_BOTH in schemes, _INNER in schemes)
        rotation = self.rotation if self.rotation is not None else _INNER in schemes
        rotations = (True, False) if _INNER in schemes else (False,)
        fix = "" if inner else self._of_others("rotation", [_INNER])
        _expect_one("rotation", "unsupported rotation", rotation, rotations, fix)
        object.__setattr__(self, "rotation", rotation)

    def _of_others(self, name: str, owners: Iterable[str]) -> str:
        """How to mend a field that is of ``owners``, none of which the config has."""
        schemes = ", ".join(owners)
        if {self.scheme, *self.layers.values()} == {"none"}:
            return f"{{scheme}}, which is missing or none: {{{name}}} needs one of {schemes}"
        unfit = f"{{{name}}}, which {self.layers_label} does not support"
        return f"{unfit}: leave it out, or use a {{scheme}} of {schemes}"

    def _check_method(self, schemes: Collection[str], clusters: bool) -> None:
        """``clusters``: a layer is of RPTQ, whose methods are the only ones then."""
        every = {m for scheme in schemes for m in _METHODS_OF[scheme]}
        every -= {"gptq", "awq"} if self.source else set()
        methods = [m for m in METHODS if m in (_RPTQ_METHODS if clusters else every)]
        owners = ", ".join(scheme for scheme, own in _METHODS_OF.items() if self.method in own)
        if self.source:
            fix = "{method}: leave it out, the checkpoint's quantized values are kept"
        elif {*schemes} == {"none"}:
            fix = f"{{scheme}}, which is missing or none: {{method}} {self.method} needs one of {owners}"
        else:
            told = f"{self.layers_label} supports {', '.join(methods)}; {self.method} needs one of {owners}"
            fix = f"{{method}} or {{scheme}}: {told}"
        _expect_one("method", "unsupported quantization method", self.method, methods, fix)

    def _check_group(self, grouped: bool, clusters: bool, inner: bool) -> None:
        """``grouped``: weights may have groups and zeros; ``clusters``: a layer is of RPTQ, whose blocks are
        groups; ``inner``: a layer is of w4a8.
        """
        default = _DEFAULT_GROUP if grouped or clusters or inner else 0
        group = self.group if self.group is not None else default
        symmetric = self.symmetric if self.symmetric is not None else not (grouped or inner)
        sizes = INNER_GROUPS if inner else GROUPS[1:] if clusters else GROUPS if grouped else (0,)
        fix = "" if grouped or clusters or inner else self._of_others("group", (_GROUPED, _INNER, *RPTQ))
        _expect_one("group", "unsupported group size", group, sizes, fix)
        allowed = (True, False) if grouped else (not inner,)
        fix = "" if grouped else self._of_others("symmetric", [_GROUPED])
        _expect_one("symmetric", "unsupported symmetry", symmetric, allowed, fix)
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "symmetric", symmetric)

    def _check_activations(self, both: bool, inner: bool) -> None:
        """Fields of w8a8; ``both``: whether some layer has it, ``inner``: whether some has w4a8."""
        rounds = both or inner
        activations = self.activations if self.activations is not None else "dynamic" if rounds else "none"
        smooth = self.method == "smoothquant"
        alpha = self.alpha if self.alpha is not None or not smooth else _DEFAULT_ALPHA
        of_both = ACTIVATIONS if both else ACTIVATIONS[:1] if inner else ("none",)
        if inner or (both and self.method not in ("round", "smoothquant")):
            of_both = of_both[:1]  # nothing else than these two finds a scale
        fix = "" if both else self._of_others("activations", [_BOTH])
        _expect_one("activations", "unsupported activations", activations, of_both, fix)
        scales = WEIGHT_SCALES if both else WEIGHT_SCALES[:1]
        fix = "" if both else self._of_others("weight_scales", [_BOTH])
        _expect_one("weight_scales", "unsupported weight scales", self.weight_scales, scales, fix)
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 <= alpha <= 1
        if not (number or alpha == SEARCH if smooth else alpha is None):
            allowed = f"0 to 1, or {SEARCH}" if smooth else "none"
            lacks = "{method} smoothquant" if both else f"{{scheme}} {_BOTH} and {{method}} smoothquant"
            fix = (
                "" if smooth else f"{{alpha}}, which only smoothquant supports: leave it out, or add {lacks}"
            )
            raise QuantFieldError("alpha", "invalid alpha", seen=alpha, allowed=allowed, advice=fix)
        object.__setattr__(self, "activations", activations)
        object.__setattr__(self, "alpha", float(alpha) if isinstance(alpha, int) else alpha)

    def at(self, module: str) -> QuantConfig:
        """The config of one linear layer, by its name in the decoder: ``layers`` and ``head`` are decided."""
        scheme = self.head if module == HEAD else self.scheme
        if module != HEAD:
            matched = [s for pattern, s in self.layers.items() if fnmatch.fnmatchcase(module, pattern)]
            scheme = matched[-1] if matched else scheme
        if self.source and scheme in _WEIGHT_ONLY and module != HEAD:
            kept = (self.source, self.act_order)
            return QuantConfig(scheme, self.group, self.symmetric, source=kept[0], act_order=kept[1])
        if scheme in RPTQ:
            return QuantConfig(scheme, self.group, method=self.method)
        if scheme == _GROUPED:
            method = "round" if self.method == "smoothquant" else self.method
            return QuantConfig(scheme, self.group, self.symmetric, method)
        if scheme == _BOTH:
            smooth = self.method == "smoothquant"
            return QuantConfig(
                scheme,
                method=self.method if smooth else "round",
                activations=self.activations,
                alpha=self.alpha if smooth else None,
                weight_scales=self.weight_scales,
            )
        if scheme == _INNER:
            method = "gptq" if self.method == "gptq" else "round"
            return QuantConfig(scheme, self.group, method=method, rotation=self.rotation)
        rounds = module == HEAD or scheme == "none" or self.method == "smoothquant"
        return QuantConfig(scheme, method="round" if rounds else self.method)

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
            fix = f"; for {HEAD}, set `head: w8a16` next to layers" if of_head else ""
            raise ConfigError(
                "patterns in layers match no linear layer",
                seen=idle,
                allowed=f"layers.N.…, for example {names[0] if names else 'none'}; they end in {leaves}",
                flag=f"--quant: layers in its file{fix}",
            )

    def check_in_memory(self) -> None:
        """Refuse methods that need samples, where there is only a model.

        Raises:
            ConfigError: naming ``ingot build``.
        """
        if self.calibrated:
            by_method = self.method != "round"
            flags = f"--quant {'FILE.yaml' if self.layers else self.scheme}"
            if not self.in_clusters:
                flags += f" --method {self.method}" if by_method else " --activations static"
            what = self.method_word if by_method else "a static scale"
            raise ConfigError(
                f"{'RPTQ' if self.in_clusters else what} needs calibration, which only a build does",
                seen=self.needs_samples,
                allowed="a scheme other than RPTQ, method round, activations dynamic",
                fix=f"`ingot build CHECKPOINT -o ENGINE {flags} --calib FILE`, then load that engine",
            )

    @property
    def in_clusters(self) -> bool:
        """Whether some layer is of RPTQ."""
        return any(scheme in RPTQ for scheme in (self.scheme, *self.layers.values()))

    @property
    def calibrated(self) -> bool:
        """Whether numbers or scales are chosen by what layers see."""
        return bool(self.needs_samples)

    @property
    def needs_samples(self) -> str:
        """What is chosen by samples, as it is asked for; empty where nothing is."""
        if self.source:
            return ""
        parts = [f"method {self.method}"] if self.method != "round" else []
        parts += [scheme for scheme in RPTQ if scheme in (self.scheme, *self.layers.values())]
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
        return {self.scheme, self.head, *self.layers.values()} == {"none"}

    @property
    def layers_label(self) -> str:
        """The schemes of the decoder's layers in a word: ``w4a16``, ``w4a16+w8a16``."""
        return "+".join(dict.fromkeys((self.scheme, *self.layers.values())))

    @property
    def label(self) -> str:
        """A short name: the layers' schemes, and the head's where it has one."""
        return self.layers_label if self.head == "none" else f"{self.layers_label}, head {self.head}"

    @property
    def summary(self) -> str:
        """What is stored, for people."""
        parts = [self.label]
        schemes = {self.scheme, *self.layers.values()}
        if _GROUPED in schemes or self.source:
            parts.append(f"one scale per {self.group} columns" if self.group else "one scale per row")
            parts.append("symmetric" if self.symmetric else "asymmetric")
        if self.in_clusters:
            parts.append(f"activations in blocks of {self.group} reordered columns")
        parts += ["columns grouped by act-order"] if self.act_order else []
        if _INNER in schemes:
            parts += [
                f"one inner scale per {self.group} columns",
                "rotated" if self.rotation else "not rotated",
            ]
        if schemes & {_BOTH, _INNER}:
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


def _expect_one(name: str, what: str, seen: object, allowed: Iterable[object], advice: str = "") -> None:
    choices = list(allowed)
    if not any(seen == one and type(seen) is type(one) for one in choices):
        if any(str(seen) == str(one) for one in choices):  # a number or truth value in quotes
            seen = f"{seen!r} of type {type(seen).__name__}"
        raise QuantFieldError(name, what, seen=seen, allowed=choices, advice=advice)
