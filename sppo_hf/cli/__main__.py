"""`python -m sppo_hf.cli`, for where the console script is not on the path."""

from sppo_hf.cli import main

main()
