"""Plans and timelines as tables, pictures, traces and JSON; no torch."""
