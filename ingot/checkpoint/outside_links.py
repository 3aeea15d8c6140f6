"""Links in a folder that somebody else made.

Covers the rule which of them may be followed.

    leads_outside(folder, folder / "config.json")
"""

from __future__ import annotations

from pathlib import Path

SNAPSHOTS, BLOBS = "snapshots", "blobs"


def leads_outside(folder: Path, path: Path) -> bool:
    """Whether ``path``, in ``folder`` or a folder in it, is a link to a place outside ``folder``.

    The cache of huggingface_hub is made of links that may be followed: from ``snapshots/<revision>`` to
    ``blobs/<hash>`` of the same repository. A link whose target is gone leads nowhere.
    """
    if not path.is_symlink() or not path.exists():
        return False
    home, target = folder.resolve(), path.resolve()
    repository = home.parent.parent
    if home.parent.name == SNAPSHOTS and target.parent == repository / BLOBS:
        return False
    return not target.is_relative_to(home)
