"""Small trainers: language models (lm), pass keys (needle), picking from sets (retrieval), CLRS-Text (clrs).

At this level: what they share, namely the device, checkpoints and interruption.
"""
