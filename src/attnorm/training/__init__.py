"""Small trainers: language models (lm), pass keys (needle), picking from sets (retrieval), CLRS-Text (clrs), images
(vision).

Each has a folder, except pass keys (needle.py, pass_keys.py). All of them share device.py and checkpoints.py.
"""
