"""Where Accelerate and the Trainer meet the engine; only the command line imports this folder."""
