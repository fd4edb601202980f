"""A whole rank of the model on one GPU, driven by the path description that the simulator reads.

    program = build_program(architecture, layout, workload, find_path("fused", kernel_set="own"))
    rank = build_rank(program, ...)                     # weights, caches, buffers, exchange slots
    step = Step(program, [rank])                        # streams and events of one decode step
    step.run()                                          # eagerly; or step.capture() once and replay()

How it is put together:

``weights``
    one rank's tensors, by layer and by the names of ``model.layout.rank_matrices``: made at random on the device, or
    cut out of a whole model (``whole_model``) for tests with several ranks.
``state``
    what lives from step to step (KV pages, recurrent and convolution states, positions) and the activations between
    kernels. All of it stays at one address, so a captured step can be replayed token after token.
``exchange``
    where pushes land: on peers emulated in the same process, or on this rank's own slots (*loop-back*: the push to
    peer r lands in own slot r, so bytes, stores and polls are those of T ranks and only the link is missing).
``call_table``
    ``stage/operator`` of a call -> how to run it: ``kernel_*`` launch on the GPU, ``reference_*`` compute the same with
    torch on any device; ``bindings`` holds what both ask of a call. A call without a binding is an error, hence no
    kernel can be in the simulator alone.
``step``
    one step in program order, each call on its stream, events where a call waits for another stream; eagerly, or
    captured into one CUDA graph.
``reference``
    the whole model in plain torch, fp32, written from the architecture and not from the path: what both paths of the
    engine must agree with, token by token.
``memory``
    what a rank needs before anything is allocated, and what would fit instead.

Measuring a step and turning it into a timeline is ``calibrate.decode``: a timeline belongs to ``sim``, which the
kernels do not import.
"""
