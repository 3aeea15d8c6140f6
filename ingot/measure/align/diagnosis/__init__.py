"""Why an engine differs from the original: the stage run again with one thing changed at a time.

``*_variants.py`` list what ports get wrong.
"""

from ingot.measure.align.diagnosis.variant_search import explain, explain_first

__all__ = ["explain", "explain_first"]
