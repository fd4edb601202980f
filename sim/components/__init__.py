"""One class, one physical thing of a GPU or of the links between GPUs."""
