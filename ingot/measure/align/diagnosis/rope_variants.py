"""What ports get wrong about rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ingot.config.decoder_config import DecoderConfig, RopeConfig
from ingot.layers.rotary import frequencies
from ingot.measure.align.diagnosis.stage_spec import AttentionSpec, RopeSpec
from ingot.measure.align.diagnosis.variant import Claim, Variant, mirrored

# Llama 1 and 2, Qwen 1.5, Yi, Code Llama, Qwen2, Llama 3, DeepSeek, InternLM2, Mistral ...
BASES = (1e4, 5e5, 1e6, 2.5e4, 4e4, 5e4, 1e5, 1.5e5, 2.5e5, 3e5, 2e6, 3e6, 5e6, 8e6, 1e7, 1e8, 1e9)
FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0)
ORIGINAL_LENGTHS = (2048, 4096, 8192, 32768)
ROPE_TEXT = "rotary positions (RoPE)"


def rope_variants(
    spec: AttentionSpec, config: DecoderConfig, new_tokens: int
) -> Iterator[Variant[AttentionSpec]]:
    """Every variant of the rotation; ``new_tokens`` are the last rows, those of the step."""
    if spec.rope is None or config.rope is None:
        yield from _added(spec)
        return
    rope = spec.rope
    yield from _times(spec, rope)
    for base in BASES:
        if base != config.rope.theta:
            yield base_variant(spec, rope, config.rope, base)
    other = "neighbouring channels" if not rope.interleaved else "channels half a head apart"
    yield mirrored(
        replace(spec, rope=replace(rope, interleaved=not rope.interleaved)),
        f"RoPE rotating pairs of {other}",
        "rope_style",
        "RoPE pairs different channels from the original (half-split, interleaved), or the rows of q and k "
        "are ordered for the other style",
    )
    yield mirrored(
        replace(spec, rope=replace(rope, query_turns=-rope.query_turns, key_turns=-rope.key_turns)),
        "RoPE rotating backwards",
        "rope_style",
        "RoPE rotates in the opposite direction",
    )
    yield from _positions(spec, rope, new_tokens)
    yield from _scalings(spec, rope, config.rope)


def _added(spec: AttentionSpec) -> Iterator[Variant[AttentionSpec]]:
    """For a config without RoPE: with it, at the usual bases."""
    for base in BASES:
        turning = frequencies(RopeConfig(spec.head_dim, base)).to(spec.positions.device)
        rope = RopeSpec(turning, spec.positions, spec.positions)
        yield Variant(
            replace(spec, rope=rope),
            f"RoPE with base {base:g}",
            Claim("rope_missing", f"{ROPE_TEXT} are not applied"),
            Claim("rope_extra", f"{ROPE_TEXT} are applied where the original has none"),
        )


def _times(spec: AttentionSpec, rope: RopeSpec) -> Iterator[Variant[AttentionSpec]]:
    names = {"queries and keys": (True, True), "queries": (True, False), "keys": (False, True)}
    for who, (query, key) in names.items():

        def turned(times: int, query: bool = query, key: bool = key) -> AttentionSpec:
            changed = replace(rope, query_turns=times if query else 1, key_turns=times if key else 1)
            return replace(spec, rope=changed)

        yield Variant(
            turned(2),
            f"RoPE applied twice to {who}",
            Claim("rope_once", f"{ROPE_TEXT} are applied once to {who}, the original does it twice"),
            Claim("rope_twice", f"{ROPE_TEXT} are applied twice to {who}"),
        )
        yield Variant(
            turned(0),
            f"RoPE not applied to {who}",
            Claim("rope_extra", f"{ROPE_TEXT} are applied to {who}, which the original does not do"),
            Claim("rope_missing", f"{ROPE_TEXT} are not applied to {who}"),
        )


def base_variant(
    spec: AttentionSpec, rope: RopeSpec, config: RopeConfig, base: float
) -> Variant[AttentionSpec]:
    """RoPE with another base, everything else as the config says."""
    turning = frequencies(replace(config, theta=base)).to(rope.frequencies)
    return Variant(
        replace(spec, rope=replace(rope, frequencies=turning)),
        f"the RoPE base {base:g}",
        Claim("rope_base", f"the RoPE base is {config.theta:g}, the original's is {base:g}"),
        Claim("rope_base", f"RoPE runs with base {base:g}, though the config says {config.theta:g}"),
    )


def _positions(spec: AttentionSpec, rope: RopeSpec, new_tokens: int) -> Iterator[Variant[AttentionSpec]]:
    """Positions are relative: a shift only matters for some tokens, or one of queries and keys."""

    def moved(by: int) -> RopeSpec:
        positions = spec.positions.clone()
        positions[-new_tokens:] += by
        return replace(rope, query_positions=positions, key_positions=positions)

    has_cached = new_tokens < spec.positions.shape[0]
    for shift in (1, -1):
        queries = rope.query_positions + shift
        yield _shifted(spec, replace(rope, query_positions=queries), f"queries' positions {shift:+d}", shift)
        if has_cached:
            yield _shifted(spec, moved(shift), f"the new tokens' positions {shift:+d}", shift)
    if has_cached:
        first = int(spec.positions[-new_tokens])
        yield _shifted(spec, moved(-first), "the new tokens' positions counted from 0", 0)


def _shifted(spec: AttentionSpec, rope: RopeSpec, change: str, shift: int) -> Variant[AttentionSpec]:
    how = f"off by one ({change})" if shift else f"wrong ({change})"
    return mirrored(
        replace(spec, rope=rope), f"RoPE at {change}", "rope_position", f"RoPE positions are {how}"
    )


def _scalings(spec: AttentionSpec, rope: RopeSpec, config: RopeConfig) -> Iterator[Variant[AttentionSpec]]:
    plain = RopeConfig(config.dim, config.theta)
    others = []
    if config.scaling != "none" or config.attention_factor != 1.0:
        others += [plain, replace(config, attention_factor=1.0)]
    lengths = (*([config.original_max] if config.original_max else []), *ORIGINAL_LENGTHS)
    for factor in FACTORS:
        others.append(replace(plain, scaling="linear", factor=factor))
        for length in lengths:
            scaled = replace(plain, factor=factor, original_max=length)
            others += [replace(scaled, scaling="llama3"), replace(scaled, scaling="yarn")]
    for other in others:
        turning = frequencies(other).to(rope.frequencies)
        changed = replace(rope, frequencies=turning, factor=other.attention_factor)
        ours, seen = _describe(config), _describe(other)
        yield Variant(
            replace(spec, rope=changed),
            f"RoPE scaling {seen}",
            Claim("rope_scaling", f"RoPE scaling is {ours}, the original's is {seen}"),
            Claim("rope_scaling", f"RoPE runs with scaling {seen}, though the config says {ours}"),
        )


def _describe(rope: RopeConfig) -> str:
    if rope.scaling == "none":
        return "none"
    parts = [f"factor {rope.factor:g}"] if rope.scaling != "qwen_ntk" else []
    parts += [f"original length {rope.original_max}"] if rope.original_max else []
    parts += [f"magnitude {rope.attention_factor:.4g}"] if rope.attention_factor != 1.0 else []
    return f"{rope.scaling} ({', '.join(parts)})"
