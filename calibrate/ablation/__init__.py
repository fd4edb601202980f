"""Ablation: what each rule of the model does to the agreement with what was measured, when it is off."""
