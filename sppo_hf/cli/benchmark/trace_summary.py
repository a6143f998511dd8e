"""x."""
STEP_LABEL = "sppo/step"
