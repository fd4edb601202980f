"""Where the cache of Hugging Face has a model's config: ``models--OWNER--NAME/snapshots/REVISION/config.json``.

Nothing is fetched. The folders are those that ``huggingface_hub`` looks at: ``HF_HUB_CACHE``, then ``HF_HOME/hub``,
then ``XDG_CACHE_HOME`` and ``~/.cache`` with ``huggingface/hub``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from k3sim.errors import UserError
from k3sim.model.documents.document import shown_path

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def hub_folder() -> Path:
    """The folder of the cache."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if cache:
        return Path(cache)
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home) / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface" / "hub"


def cached_model(name: str) -> Path | None:
    """The folder of ``owner/name`` in the cache; None for what is no such name, or is a path of the user's.

    Raises UserError for a model that the cache has not.
    """
    if not REPOSITORY.fullmatch(name) or os.path.exists(name) or name.lower().endswith(".json"):
        return None
    folder = hub_folder() / f"models--{name.replace('/', '--')}"
    if not folder.is_dir():
        raise UserError(
            f"model {name!r} is neither a path nor in the cache {shown_path(hub_folder())}; download its config.json, "
            "or give a name of 'k3sim models'"
        )
    return folder


def snapshot_config(model: Path) -> Path | None:
    """The config of a model's folder in the cache: of the revision that ``refs/main`` names, or of its only snapshot.

    None where there is no snapshot with a config. Raises UserError for several of which none is the main one.
    """
    try:
        found = sorted(model.glob("snapshots/*/config.json"))
        main = model / "refs" / "main"
        revision = main.read_text(encoding="utf-8").strip()[:80] if len(found) > 1 and main.is_file() else ""
    except (OSError, ValueError):
        return None
    chosen = [one for one in found if one.parent.name == revision] or found
    if len(chosen) > 1:
        names = ", ".join(one.parent.name[:12] for one in chosen[:5])
        raise UserError(f"{shown_path(model)}: holds {len(chosen)} snapshots ({names}); give the folder of one")
    return chosen[0] if chosen else None
