"""Measuring decoders: acceptance, speed, intervals, records of runs, calibration, comparisons."""
