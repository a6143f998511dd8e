"""One causal attention kernel per file behind one signature; must not know chunks of a model."""
