"""Small trainers: language models (lm), pass keys (needle), and picking from sets (retrieval).

At this level: what the three share, namely the device, checkpoints and interruption.
"""
