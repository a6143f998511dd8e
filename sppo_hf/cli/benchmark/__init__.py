"""The benchmark behind `sppo bench`: a driver, workers that run one job each, and their results.

[Note: what the numbers of a benchmark mean]
A job is one contender at one length, in a process of its own. Its weights are random and made on
the device, its rows are random tokens, and the standard Trainer trains it. A step lasts from the
Trainer's on_step_begin to its on_step_end and until the device is done: forward, backward, clipping
and the optimizer, but neither data loading nor logging. Warm-up steps do not count for seconds,
losses and stalls, but do for memory peaks, which are those of the whole training after the weights
were made. Seconds are the median of the measured steps.
"""
