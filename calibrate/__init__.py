"""Is it true: published evidence, samples, and predictions beside them."""
