"""A decode step as one persistent kernel: instructions in a queue for each SM, counters in L2 in place of launches.

``instructions`` says what an instruction is, ``schedule`` makes the list from the program that the simulator reads,
``validator`` refuses a list that could hang or race, ``reference`` runs one on the CPU, ``kernel`` runs it on a GPU and
``launch`` starts that. Of the model it covers the KDA mixer and the dense FFN (docs/megakernel.md).
"""
