"""The commands, one module each with its options and its printing; ``k3sim/cli.py`` puts them together.

A module is imported when its command is given, and imports what it runs where it runs it: ``k3sim --help`` waits for
none of it.
"""
