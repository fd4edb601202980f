"""The version of the package, in a module of its own: reports name it, and the package names reports."""

from __future__ import annotations

VERSION = "0.1.0"
