"""``python -m k3sim``: the command line."""

from k3sim.cli import main

main()
