"""Errors a user can cause.

UserError (ValueError)
  what was given, what is accepted, what to do: one line, exit status 2 on the command line
"""

from __future__ import annotations


class UserError(ValueError):
    """Raised for input that cannot be honoured: one line that says what was given and what is accepted."""
