"""A diagnosis as tables, as JSON, and as comments of the file that it writes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ingot.config.half_dtypes import in_encoder
from ingot.config.quantization.scheme_table import saves_time_only
from ingot.config.units import size_text
from ingot.measure.evaluate.doctor.doctor_session import BYTES, TIME, Diagnosis, Layer, LayerCosts
from ingot.measure.evaluate.doctor.precision_options import DENSE
from ingot.measure.evaluate.doctor.scheme_patterns import layer_index, layer_of, operator
from ingot.measure.side.text_table import Table, percent, score

SHOWN = 20  # layers, unless all are asked for
FORMAT = 1


def tables(found: Diagnosis, *, every: bool = False, more: str = "every=True") -> list[Table]:
    """The most sensitive layers first; sums by operator and by layer; the mix beside one scheme for all."""
    ordered = sorted(found.layers, key=lambda layer: -_first(found, layer))
    shown = ordered if every else ordered[:SHOWN]
    left = len(ordered) - len(shown)
    title = f"KL of each layer alone in nats, largest first{f'; {left} more with {more}' if left else ''}"
    narrow, mix = _narrow(found), found.chosen
    rows = []
    for layer in shown:
        figures = (*(score(layer.kl[scheme]) for scheme in narrow), _share(found, [layer]))
        rows.append((layer.name, *figures, "-" if mix is None else mix.schemes[layer.name]))
    columns = ("layer", *narrow, "share", "in the mix")
    operators = _sums(found, "operator", operator)
    encodes = any(in_encoder(layer.name) for layer in found.layers)
    places = _sums(found, "layer" if encodes else "decoder layer", layer_of)
    return [Table(title, columns, tuple(rows)), operators, places, _mixes(found)]


def verdict(found: Diagnosis) -> str:
    """One line: whether a mix holds, and which."""
    limit = f"{found.wanted.budget:g} nats"
    if found.chosen is None:
        least = min(found.uniform.items(), key=lambda one: one[1].measured)
        wider = "" if found.ladder[-1] == DENSE else "; `up_to=none` lets layers stay unquantized"
        return f"no mix stays within {limit}: all layers in {least[0]} give {score(least[1].measured)}{wider}"
    if found.quant is None:
        return f"only unquantized layers stay within {limit}: nothing is gained"
    measured, predicted = score(found.chosen.measured), score(found.chosen.predicted)
    return f"KL {measured} measured, {predicted} predicted, limit {limit}: {_counted(found.chosen)}"


def record(found: Diagnosis, command: str) -> dict[str, Any]:
    """The diagnosis as JSON types; layers in the model's order."""
    wanted = found.wanted
    return {
        "format": FORMAT,
        "verb": "doctor",
        "command": command,
        **found.facts,
        "quant": wanted.quant.to_json(),
        "budget": {"kl_mean": wanted.budget},
        "least": wanted.least or (TIME if saves_time_only(found.ladder[0]) else BYTES),
        "ladder": list(found.ladder),
        "layers": [
            {
                "name": layer.name,
                "operator": operator(layer.name),
                "layer": layer_index(layer.name),
                "weights": layer.num_weights,
                "bytes": layer.num_bytes,
                "kl": layer.kl,
                "scheme": None if found.chosen is None else found.chosen.schemes[layer.name],
            }
            for layer in found.layers
        ],
        "operators": _summed(found, operator),
        "decoder_layers": _summed(found, layer_of, encoder=False),
        "encoder_layers": _summed(found, layer_of, encoder=True),
        "uniform": {scheme: _mix_json(one) for scheme, one in found.uniform.items()},
        "tried": [_mix_json(one) for one in found.tried],
        "chosen": None if found.chosen is None else _mix_json(found.chosen),
        "chosen_quant": None if found.quant is None else found.quant.to_json(),
        "held": found.quant is not None,
    }


def comments(found: Diagnosis, command: str) -> list[str]:
    """Lines about the origin of a mix that holds, for its file."""
    chosen, data, counts = found.chosen, found.facts["data"], found.facts["counts"]
    assert chosen is not None, "only a mix that holds is written"
    others = ", ".join(f"{size_text(one.num_bytes)} in {scheme}" for scheme, one in found.uniform.items())
    return [
        command,
        f"data: {data['file']}, sha256 {data['sha256']}",
        f"{counts['documents']} texts, {counts['counted_tokens']} tokens counted",
        f"KL in nats, mean per token: {chosen.measured:.3e} measured, {chosen.predicted:.3e} predicted, "
        f"{found.wanted.budget:g} allowed",
        f"linear layers: {size_text(chosen.num_bytes)}; {others}",
    ]


def _sums(found: Diagnosis, what: str, key: Callable[[str], str]) -> Table:
    summed = _summed(found, key)
    rows = [
        (name, *map(score, summed[name].values()), _share(found, own))
        for name, own in _grouped(found.layers, key).items()
    ]
    return Table(f"summed by {what}", (what, *_narrow(found), "share"), tuple(rows))


def _summed(
    found: Diagnosis, key: Callable[[str], str], encoder: bool | None = None
) -> dict[str, dict[str, float]]:
    """Sums over the encoder's layers, the decoder's, or (None) all."""
    groups = _grouped([one for one in found.layers if encoder in (None, in_encoder(one.name))], key)
    return {
        name: {scheme: math.fsum(layer.kl[scheme] for layer in own) for scheme in _narrow(found)}
        for name, own in groups.items()
    }


def _grouped(layers: Sequence[Layer], key: Callable[[str], str]) -> dict[str, list[Layer]]:
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(key(layer.name), []).append(layer)
    return groups


def _mixes(found: Diagnosis) -> Table:
    named = [(f"all {scheme}", one) for scheme, one in found.uniform.items()]
    named += [("the mix", found.chosen)] if found.chosen is not None else []
    named.sort(key=lambda one: one[1].num_bytes)
    rows = [
        (name, size_text(one.num_bytes), score(one.predicted), score(one.measured)) for name, one in named
    ]
    columns = ("", "linear layers", "KL predicted", "KL measured")
    goals = {BYTES: "fewest bytes, which decode time follows", TIME: "fewest weights outside 8-bit matmuls"}
    key = TIME if saves_time_only(found.ladder[0]) else BYTES
    return Table(f"the mix ({goals[key]}) and one scheme for all layers", columns, tuple(rows))


def _narrow(found: Diagnosis) -> list[str]:
    return [scheme for scheme in found.ladder if scheme != DENSE]


def _first(found: Diagnosis, layer: Layer) -> float:
    """The layer's KL in the scheme to begin with."""
    return layer.kl[found.ladder[0]]


def _share(found: Diagnosis, layers: Sequence[Layer]) -> str:
    whole = math.fsum(_first(found, layer) for layer in found.layers)
    part = math.fsum(_first(found, layer) for layer in layers)
    return percent(part / whole if whole > 0 else None)


def _counted(mix: LayerCosts) -> str:
    counts = Counter(mix.schemes.values())
    words = {count: "layer" if count == 1 else "layers" for count in counts.values()}
    return ", ".join(f"{count} {words[count]} in {scheme}" for scheme, count in counts.most_common())


def _mix_json(one: LayerCosts) -> dict[str, Any]:
    return {
        "bytes": one.num_bytes,
        "kl_predicted": one.predicted,
        "kl_measured": one.measured,
        "schemes": dict(Counter(one.schemes.values())),
    }
