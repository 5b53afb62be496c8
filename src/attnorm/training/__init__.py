"""Small trainers: language models (lm), pass keys (needle), picking from sets (retrieval), CLRS-Text (clrs), images.

At this level, beside the trainers of one file: what they share, namely device.py and checkpoints.py.
"""
