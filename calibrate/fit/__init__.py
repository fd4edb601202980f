"""From samples to the values of a machine profile, with intervals."""
