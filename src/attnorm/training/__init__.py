"""Small trainers: language models (lm), pass keys (needle), picking from sets (retrieval), CLRS-Text (clrs), images
(vision).

At this level, beside the trainer of one file: what they share, namely device.py and checkpoints.py.
"""
