"""Makes the worlds of this folder (``tiny``) importable from the tests of its rooms."""
