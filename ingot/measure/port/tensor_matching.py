"""Which of a checkpoint's tensors an architecture's rules take, by pattern, and what the others may be.

matching = match_tensors(LLAMA, reading.config, patterns)
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ingot.checkpoint.name_rules import Ignore, Rename, Rule, Shape, Tie, Transform
from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.json_config import JsonConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.assembly import logical_shapes
from ingot.errors import IngotError
from ingot.measure.port.tensor_patterns import TensorPattern, pattern_of
from ingot.models.architecture import Architecture

# Ends of our tensors → the setting of DecoderConfig that gives the model such a tensor.
_SETTINGS = (
    ("layernorm.bias", 'norm="layer_norm"'),
    ("norm.bias", 'norm="layer_norm"'),
    ("qkv_proj.bias", "qkv_bias=True"),
    ("o_proj.bias", "output_bias=True"),
    ("_proj.bias", "mlp_bias=True"),
    ("lm_head.bias", "head_bias=True"),
)
_NAMES = (("self_attn.q_norm.weight", "qk_norm=True"), ("self_attn.k_norm.weight", "qk_norm=True"))


@dataclass(frozen=True)
class MatchedTensor(JsonConfig):
    """A pattern and the rule that takes it.

    Attributes:
        rule: as Python code; None: no rule takes it.
        target: our tensor of that rule, with ``{layer}``.
        why: of one that no rule of the architecture takes: why ``rule`` is proposed, or what it may be.
    """

    pattern: TensorPattern
    rule: str | None = None
    target: str | None = None
    why: str | None = None


@dataclass(frozen=True)
class TensorMatching(JsonConfig):
    """How an architecture's rules fit a checkpoint's tensors.

    Attributes:
        tensors: every pattern; those with a rule and without ``why`` are matched.
        rules: code of the rules that are complete, proposals included, in the order of the architecture.
        without_tensor: code of the rules whose tensors are not there.
        prefixes: of the weight map.
    """

    tensors: tuple[MatchedTensor, ...]
    rules: tuple[str, ...]
    without_tensor: tuple[str, ...]
    prefixes: tuple[str, ...] = ("",)

    @property
    def matched(self) -> int:
        """Patterns that a rule of the architecture takes."""
        return sum(one.rule is not None and one.why is None for one in self.tensors)

    @property
    def share(self) -> float:
        """Matched patterns of all patterns and of the rules without a tensor, 0 to 1."""
        total = len(self.tensors) + len(self.without_tensor)
        return self.matched / total if total else 0.0


@dataclass
class _Matcher:
    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...]
    patterns: Mapping[str, TensorPattern]
    expected: Mapping[str, Shape]
    found: dict[str, MatchedTensor] = field(default_factory=dict)

    def stored(self, source: str) -> str | None:
        """The pattern of a rule's source, with or without prefix; None: the checkpoint has none."""
        names = (pattern_of((p + source).replace("{layer}", "0")) for p in (*self.prefixes, ""))
        return next((name for name in names if name in self.patterns), None)

    def take(self, rule: Transform) -> bool:
        """Match a rule's sources; False: some are not in the checkpoint."""
        names = [self.stored(source) for source in rule.inputs]
        present = [name for name in names if name is not None]
        if len(present) < len(names):
            return False
        for name in present:
            self.found[name] = MatchedTensor(self.patterns[name], rule_code(rule), rule.outputs[0])
        return True

    def propose(self, rule: Transform) -> Rename | None:
        """A rename for a rule without tensors, where the checkpoint has our own name and shape."""
        for target in rule.outputs:
            own = pattern_of(target.replace("{layer}", "0"))
            for name, pattern in self.patterns.items():
                free = name not in self.found and (name == own or name.endswith("." + own))
                if free and self.expected.get(target.replace("{layer}", "0")) == pattern.shape:
                    made = Rename(target, name.replace("{i}", "{layer}"))
                    why = "Ingot's own name and shape: check the order of its parts"
                    self.found[name] = MatchedTensor(pattern, rule_code(made), target, why)
                    return made
        return None

    def hint(self, pattern: TensorPattern) -> MatchedTensor:
        """An unmatched tensor, and what it is beside."""
        module, _, kind = pattern.name.rpartition(".")
        named = next((text for end, text in _NAMES if pattern.name.endswith(end)), None)
        if named is not None:
            return MatchedTensor(pattern, None, None, f"Ingot's own name: the model has it with {named}")
        beside = self.found.get(f"{module}.weight")
        if beside is None or beside.target is None or kind == "weight":
            return MatchedTensor(pattern)
        target = f"{beside.target.rpartition('.')[0]}.{kind}"
        setting = next((text for end, text in _SETTINGS if target.endswith(end)), None)
        with_it = f", which the model has with {setting}" if setting else ", which the model does not have"
        return MatchedTensor(pattern, None, None, f"beside {module}.weight: our {target}{with_it}")


def match_tensors(
    architecture: Architecture, config: DecoderConfig, patterns: Sequence[TensorPattern]
) -> TensorMatching:
    """Fit the rules for ``config`` to a checkpoint's patterns; no tensor is read."""
    weights = architecture.weight_map(config, None)
    matcher = _Matcher(
        weights.rules, weights.prefixes, {p.name: p for p in patterns}, _expected(architecture, config)
    )
    fitting = {id(rule): rule for rule in weights.rules if isinstance(rule, Transform) and matcher.take(rule)}
    lacking = [r for r in weights.rules if isinstance(r, Transform) and id(r) not in fitting]
    proposed = {id(rule): matcher.propose(rule) for rule in lacking}
    _take_unbuilt(matcher)
    codes = []
    for rule in weights.rules:
        kept = fitting.get(id(rule), rule) if not isinstance(rule, Transform) else fitting.get(id(rule))
        kept = kept or proposed.get(id(rule))
        codes += [] if kept is None else [rule_code(kept)]
    return TensorMatching(
        tuple(matcher.found.get(p.name) or matcher.hint(p) for p in patterns),
        tuple(codes),
        tuple(rule_code(rule) for rule in lacking if proposed[id(rule)] is None),
        weights.prefixes,
    )


def _take_unbuilt(matcher: _Matcher) -> None:
    """Match copies of tied tensors and tensors that are ignored."""
    for rule in matcher.rules:
        if isinstance(rule, Tie):
            name = matcher.stored(rule.copy or rule.target)
            if name is not None:
                matcher.found[name] = MatchedTensor(matcher.patterns[name], rule_code(rule), rule.target)
        elif isinstance(rule, Ignore):
            for name, pattern in matcher.patterns.items():
                sample = name.replace("{i}", "0").replace("{j}", "0")
                if name not in matcher.found and any(
                    fnmatch.fnmatchcase(sample.removeprefix(prefix), rule.pattern)
                    for prefix in (*matcher.prefixes, "")
                ):
                    matcher.found[name] = MatchedTensor(pattern, rule_code(rule))


def _expected(architecture: Architecture, config: DecoderConfig) -> Mapping[str, Shape]:
    """Shapes of the model's first layer and of what is outside the layers; {}: the config has no model."""
    try:
        model = architecture.empty_model(config.cut(0, 1), BuildConfig("fp32", 1, 8), QuantConfig())
        return logical_shapes(model)
    except (IngotError, ValueError, TypeError, ArithmeticError, RuntimeError, LookupError):
        return {}


def rule_code(rule: Rule) -> str:
    """A rule as the Python code that makes it; names from files are escaped."""
    return f"{type(rule).__name__}({', '.join(_arguments(rule))})"


def _arguments(rule: Rule) -> Iterator[str]:
    for name, one in rule.__dataclass_fields__.items():
        value = getattr(rule, name)
        if value == one.default:
            continue
        text = literal(value)
        yield (
            text
            if name in ("target", "source", "sources", "targets", "pattern", "source_target")
            else (f"{name}={text}")
        )


def literal(value: object) -> str:
    """A value as Python code: strings in double quotes, in ASCII, on one line."""
    if isinstance(value, str):
        return '"' + ascii(value)[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        inner = ", ".join(map(literal, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)
