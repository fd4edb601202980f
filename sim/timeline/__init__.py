"""What happened: spans of kernels, the critical path through them, folding of layers, measured steps."""
