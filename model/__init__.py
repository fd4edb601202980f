"""What must be computed: the architecture, its layout over ranks, the operators of a decode step and its paths."""
