"""Calibration of the semantic cache on labelled requests, and simpler rules to compare it with. In reading order:

- `rows`: labelled requests from files.
- `decisions`, `fit`, `calibrate`: decisions of a cache, the fitted score, the certified threshold.
- `rules`: simpler rules; `plot`: error against hit rate.
"""
