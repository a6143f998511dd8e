"""Long documents to samples, packing and collation; must not know models."""
