"""Frames, pinned pool and copies between tiers; must not know schedules, attention or models."""
