"""Why an engine leaves the original: the stage run again with one thing changed at a time.

Owns ``explain`` and ``explain_first``. ``spec.py`` has the arithmetic, ``read.py`` fills it from an engine,
``*_variants.py`` list what ports get wrong, ``fit.py`` solves for numbers, ``ids.py`` reads token ids,
``search.py`` decides. Knows neither the original nor how a difference is found.

    findings = explain(divergence, llm.engine.model, llm.engine.manifest.model)
"""

from ingot.measure.align.diagnosis.variant_search import explain, explain_first

__all__ = ["explain", "explain_first"]
