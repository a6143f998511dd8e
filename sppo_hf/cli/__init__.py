"""The `sppo` command line; nothing may import it, and it does its work through the rooms below."""
