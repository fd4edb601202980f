"""k3sim: where a Kimi K3 decode step waits, and what would remove it."""
