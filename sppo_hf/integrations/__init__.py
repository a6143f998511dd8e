"""Where Accelerate and the Trainer meet the engine; only the command line may know this room."""
