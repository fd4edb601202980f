"""How each operator is computed and what it costs: one folder an operator."""
