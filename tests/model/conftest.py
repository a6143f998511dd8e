"""Tests here convert models without the plugin, so they say themselves how families are proved."""

import sppo_hf.model.check  # noqa: F401
