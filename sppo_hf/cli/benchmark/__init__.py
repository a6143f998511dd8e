"""What `sppo bench` is made of: jobs, the worker that runs one, rows of results, table and picture.

[Note: what the numbers of a benchmark mean]
A job is one contender at one length, in a process of its own. Its weights are random and made on
the device, its rows are random tokens, and the standard Trainer trains it. A step is what lies
between the Trainer's on_step_begin and on_step_end, the device's work included: forward, backward,
clipping and the optimizer, but neither data loading nor logging. Warm-up steps are left out of
seconds, losses and stalls, but not out of memory peaks, which are those of the whole training,
without the making of the weights. Seconds are the median of the measured steps.
"""
