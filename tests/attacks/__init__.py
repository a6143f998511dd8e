"""Attacks: input that nobody should give, faults that nobody wants, and what became of each.

Every other module here is one area (settings, commands, batches …) and has `cases(count, seed)`,
which yields `Case`s. CI tries a few of each (`test_attacks.py`); `python -m tests.attacks` tries as
many as are asked for and prints the table.
"""
